// A worker of workerd's: answers each request as clients of pages.py expect it.

const hex = (bytes) => [...new Uint8Array(bytes)].map((byte) => byte.toString(16).padStart(2, '0')).join('');

export default {
  async fetch(request) {
    const body = await request.arrayBuffer();
    const digest = hex(await crypto.subtle.digest('MD5', body));
    const query = new URL(request.url).search.slice(1);
    const lines = 'line\n'.repeat(body.byteLength % 7000);
    return new Response(`${request.method} ${query} ${body.byteLength} ${digest}\n${lines}`);
  },
};
