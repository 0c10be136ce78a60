// A web server of Node's: answers each request as clients of pages.py expect it.
//
//     page_node.js PORT

const http = require('http');
const crypto = require('crypto');

http.createServer((request, response) => {
  const chunks = [];
  request.on('data', (chunk) => chunks.push(chunk));
  request.on('end', () => {
    const body = Buffer.concat(chunks);
    const digest = crypto.createHash('md5').update(body).digest('hex');
    const query = request.url.split('?')[1] || '';
    response.end(`${request.method} ${query} ${body.length} ${digest}\n${'line\n'.repeat(body.length % 7000)}`);
  });
}).listen(Number(process.argv[2]), '127.0.0.1', 512);
