"""Serves the page of the browser's test, and writes the report that it posts to a file."""

import asyncio
import gzip
import hashlib
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import websockets

directory = sys.argv[1]
FILE = bytes(range(256)) * 400
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="31" height="17"><rect width="9" height="9"/></svg>'
FIXED = {
    "/style.css": ("text/css", b"body { color: rgb(1, 2, 3); }"),
    "/image.svg": ("image/svg+xml", SVG),
    "/frame.html": ("text/html", b"<body>in the frame</body>"),
    "/file": ("application/octet-stream", FILE),
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def reply(self, body, kind="text/plain", status=200, fields=()):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in fields:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def begin(self, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline() not in (b"\r\n", b""):
            pass
        return b"".join(parts)

    def do_GET(self):
        path = self.path.split("?")[0]
        if path in FIXED:
            return self.reply(FIXED[path][1], FIXED[path][0])
        if path == "/":
            with open(os.path.join(directory, "page.html"), "rb") as page:
                return self.reply(page.read(), "text/html")
        if path == "/slow.js":
            self.begin("text/javascript")
            for part in (b"window", b".slow", b" = 42;"):
                self.chunk(part)
                time.sleep(0.05)
            return self.chunk(b"")
        if path == "/empty":
            self.send_response(204)
            return self.end_headers()
        if path == "/moved":
            return self.reply(b"", status=302, fields=[("Location", "/file")])
        if path == "/compressed":
            return self.reply(gzip.compress(FILE), fields=[("Content-Encoding", "gzip")])
        if path == "/tagged":
            tag = '"%s"' % hashlib.sha256(FILE).hexdigest()[:16]
            if self.headers.get("If-None-Match") == tag:
                self.send_response(304)
                self.send_header("ETag", tag)
                return self.end_headers()
            return self.reply(FILE, fields=[("ETag", tag)])
        if path == "/cookie":
            return self.reply(b"", fields=[("Set-Cookie", "a=1; Path=/"), ("Set-Cookie", "b=2; Path=/")])
        if path == "/cookies":
            return self.reply(self.headers.get("Cookie", "").encode())
        if path == "/stream":
            self.begin("text/plain")
            for number in range(20):
                self.chunk(b"part %d\n" % number)
                time.sleep(0.01)
            return self.chunk(b"")
        if path == "/events":
            self.begin("text/event-stream")
            for number in range(5):
                self.chunk(b"data: %d\n\n" % number)
            return self.chunk(b"")
        if path == "/endless":
            self.begin("application/octet-stream")
            try:
                while True:
                    self.chunk(FILE)
            except OSError:
                self.close_connection = True
                return None
        return self.reply(b"there is no such page", status=404)

    do_HEAD = do_GET

    def do_POST(self):
        body = self.body()
        if self.path == "/report":
            with open(os.path.join(directory, "report.part"), "wb") as report:
                report.write(body)
            os.rename(os.path.join(directory, "report.part"), os.path.join(directory, "report"))
            return self.reply(b"thanks")
        if self.path == "/echo":
            return self.reply(body, "application/octet-stream")
        kind = self.headers.get("Content-Type", "").split(";")[0]
        return self.reply(f"{self.command} {len(body)} {kind}".encode())

    do_PUT = do_DELETE = do_POST


async def chat(socket, path=None):
    async for message in socket:
        await socket.send(message)


async def main():
    server = ThreadingHTTPServer(("127.0.0.1", 9001), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    async with websockets.serve(chat, "127.0.0.1", 9002, max_size=None):
        print("ready", flush=True)
        await asyncio.Future()


asyncio.run(main())
