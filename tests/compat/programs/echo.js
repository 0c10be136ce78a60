// Echo server and verifying client on Node's net module, both with backpressure.
//
//     echo.js server PORT
//     echo.js client PORT CONNECTIONS MEGABYTES
//
// Each connection sends a byte stream in chunks of many sizes, waiting for 'drain' whenever write() says so, and
// compares what comes back byte by byte. The server pauses its input while its output is full. Prints one digest
// over all connections, which depends on the arguments only. ECHO_HOST in the environment is another address than
// 127.0.0.1.

const net = require('net');
const crypto = require('crypto');

const HOST = process.env.ECHO_HOST || '127.0.0.1';
const HOLD = 500; // milliseconds that a connection stays open after its last byte, so that the status shows it

/** One block of bytes that look random; every connection sends windows of it. */
const BLOCK = 1 << 20;
const block = Buffer.alloc(BLOCK + 65536);
for (let index = 0, state = 1; index < block.length; index++) {
  state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
  block[index] = state >>> 24;
}

/** The chunks of a connection: each from another place, so that one taken for another does not go unseen. */
function stream(seed) {
  let place = seed * 7919;
  return (size) => {
    place = (place + 104729) % BLOCK;
    return block.subarray(place, place + size);
  };
}

function server(port) {
  net.createServer((socket) => {
    socket.on('data', (chunk) => {
      if (!socket.write(chunk)) {
        socket.pause();
        socket.once('drain', () => socket.resume());
      }
    });
    socket.on('end', () => socket.end());
    socket.on('error', (error) => console.error('server:', error.message));
  }).listen(port, HOST, 512);
}

function client(port, seed, total) {
  return new Promise((resolve, reject) => {
    const sizes = [1, 17, 300, 1024, 4096, 20000, 65536];
    const next = stream(seed);
    const digest = crypto.createHash('sha256');
    const unanswered = [];
    let sent = 0, received = 0, turn = seed;
    const socket = net.connect(port, HOST);
    const pump = () => {
      while (sent < total) {
        const chunk = next(Math.min(sizes[turn++ % sizes.length], total - sent));
        sent += chunk.length;
        unanswered.push(chunk);
        if (!socket.write(chunk)) {
          socket.once('drain', pump);
          return;
        }
      }
    };
    socket.on('connect', pump);
    socket.on('data', (chunk) => {
      digest.update(chunk);
      received += chunk.length;
      while (chunk.length > 0) {
        const expected = unanswered[0];
        if (!expected) return reject(new Error(`connection ${seed}: more came back than was sent`));
        const size = Math.min(expected.length, chunk.length);
        if (expected.compare(chunk, 0, size, 0, size) !== 0) {
          return reject(new Error(`connection ${seed}: other bytes came back before ${received}`));
        }
        if (size === expected.length) unanswered.shift(); else unanswered[0] = expected.subarray(size);
        chunk = chunk.subarray(size);
      }
      if (received === total) setTimeout(() => socket.end(), HOLD);
    });
    socket.on('close', () => {
      if (received !== total) return reject(new Error(`connection ${seed}: ended after ${received} of ${total}`));
      resolve(digest.digest('hex'));
    });
    socket.on('error', reject);
  });
}

const [role, port, connections, megabytes] = process.argv.slice(2);
if (role === 'server') {
  server(Number(port));
} else {
  const all = Array.from({ length: Number(connections) },
    (_, index) => client(Number(port), index, Number(megabytes) * 1024 * 1024));
  Promise.all(all).then(
    (digests) => console.log(crypto.createHash('sha256').update(digests.join('')).digest('hex')),
    (error) => { console.error(error); process.exit(1); });
}
