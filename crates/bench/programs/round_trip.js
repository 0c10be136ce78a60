// Round trips with net.Socket: `serve ADDRESS SIZE` or `load ADDRESS SIZE SECONDS`. Speaks to the bench as its own loads do.
// ADDRESS is HOST:PORT or the path of a Unix socket.
'use strict';
const net = require('net');

const WARM = 0.3;
const [role, address, sizeText, secondsText] = process.argv.slice(2);
const size = Number(sizeText);

function where(text) {
  if (text.includes('/')) return { path: text };
  const colon = text.lastIndexOf(':');
  return { host: text.slice(0, colon), port: Number(text.slice(colon + 1)) };
}

function untilInputEnds(done) {
  process.stdin.on('data', () => {});
  process.stdin.on('end', done);
}

function serve() {
  const server = net.createServer((socket) => {
    socket.setNoDelay(true);
    socket.on('error', () => {});
    socket.on('data', (chunk) => socket.write(chunk));
  });
  server.listen(where(address), () => {
    const bound = server.address();
    console.log('ready ' + (typeof bound === 'string' ? bound : `${bound.address}:${bound.port}`));
  });
  untilInputEnds(() => process.exit(0));
}

function load() {
  const message = Buffer.alloc(size, 7);
  const socket = net.connect(where(address));
  const now = () => Number(process.hrtime.bigint());
  let received = 0;
  let before = 0;
  let begin = 0;
  let end = 0;
  let measuring = false;
  let latencies = [];

  function send() {
    before = now();
    socket.write(message);
  }

  function report(seconds) {
    latencies.sort((a, b) => a - b);
    const count = latencies.length;
    console.log(JSON.stringify({
      operations: count,
      seconds,
      p50_us: latencies[Math.floor(count / 2)] / 1000,
      p99_us: latencies[Math.floor(count * 0.99)] / 1000,
    }));
  }

  socket.setNoDelay(true);
  socket.on('connect', () => {
    end = now() + WARM * 1e9;
    send();
  });
  socket.on('data', (chunk) => {
    received += chunk.length;
    if (received < size) return;
    received = 0;
    const after = now();
    latencies.push(after - before);
    if (after < end) {
      send();
    } else if (!measuring) {
      measuring = true;
      latencies = [];
      console.log('begin');
      begin = now();
      end = begin + Number(secondsText) * 1e9;
      send();
    } else {
      report((after - begin) / 1e9);
    }
  });
  untilInputEnds(() => process.exit(0));
}

(role === 'serve' ? serve : load)();
