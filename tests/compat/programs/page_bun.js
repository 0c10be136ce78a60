// A web server of Bun's: answers each request as clients of pages.py expect it.
//
//     bun page_bun.js PORT

const server = Bun.serve({
  hostname: '127.0.0.1',
  port: Number(process.argv[2]),
  async fetch(request) {
    const body = new Uint8Array(await request.arrayBuffer());
    const digest = new Bun.CryptoHasher('md5').update(body).digest('hex');
    const query = new URL(request.url).search.slice(1);
    const lines = 'line\n'.repeat(body.length % 7000);
    return new Response(`${request.method} ${query} ${body.length} ${digest}\n${lines}`);
  },
});
console.log('listening', server.port);
