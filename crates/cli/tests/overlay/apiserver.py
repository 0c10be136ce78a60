"""A small Kubernetes API server: lists with pages, and watches, over TLS. A test changes its objects
and its behaviour through a Unix socket, one JSON object for each command.

Arguments: ADDRESS PORT CONTROL DIRECTORY, which has ca.crt, server.crt and server.key."""

import http.server, json, os, queue, socket, socketserver, ssl, sys, threading, time, urllib.parse

ADDRESS, PORT, CONTROL, DIRECTORY = sys.argv[1:]
PATHS = {
    "/api/v1/pods": "pods",
    "/api/v1/namespaces": "namespaces",
    "/apis/networking.k8s.io/v1/networkpolicies": "networkpolicies",
}
# So that even short lists have several.
PAGE = 2

lock = threading.Lock()
version = 1000
floor = 0
objects = {kind: {} for kind in PATHS.values()}
history = {kind: [] for kind in PATHS.values()}
watches = {kind: set() for kind in PATHS.values()}
lists = {}
connections = set()
tokens = []
mode = ""
down = False
counts = {"lists": 0, "pages": 0, "watches": 0, "gone": 0, "unauthorized": 0, "selected": 0}


def change(what, kind, found):
    global version
    version += 1
    found["metadata"]["resourceVersion"] = str(version)
    history[kind].append((version, what, json.loads(json.dumps(found))))
    for watch in watches[kind]:
        watch.put((what, history[kind][-1][2]))


def end_connections():
    for connection in list(connections):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def command(said):
    global floor, tokens, mode, down, version
    op = said["op"]
    with lock:
        if op == "put":
            kind, found = said["kind"], said["object"]
            uid = found["metadata"].setdefault("uid", found["metadata"].get("namespace", "") + "/" + found["metadata"]["name"])
            what = "MODIFIED" if uid in objects[kind] else "ADDED"
            change(what, kind, found)
            objects[kind][uid] = found
        elif op == "delete":
            found = objects[said["kind"]].pop(said["uid"])
            change("DELETED", said["kind"], found)
        elif op == "bookmark":
            version += 1
            for kind in watches:
                for watch in watches[kind]:
                    watch.put(("BOOKMARK", {"kind": kind, "metadata": {"resourceVersion": str(version)}}))
        elif op == "expire":
            # Nothing before the present is left, neither for a new watch nor for an old one.
            version += 1
            floor = version
            for kind in watches:
                history[kind].clear()
                for watch in watches[kind]:
                    watch.put(("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}))
        elif op == "forget":
            # Open watches go on. New ones, and the rest of a list, get an error.
            version += 1
            floor = version
            for kind in history:
                history[kind].clear()
            lists.clear()
        elif op == "disconnect":
            end_connections()
        elif op == "set":
            tokens, mode, down = said.get("tokens", tokens), said.get("mode", mode), said.get("down", down)
            if said.get("disconnect"):
                end_connections()
        return dict(counts, version=version, watching={kind: len(watches[kind]) for kind in watches})


class Control(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(json.dumps(command(json.loads(line))).encode() + b"\n")


class ControlServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class Api(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        self.request.settimeout(30)
        self.request.do_handshake()
        self.request.settimeout(None)
        super().setup()
        with lock:
            connections.add(self.request)

    def finish(self):
        with lock:
            connections.discard(self.request)
        try:
            super().finish()
        except OSError:
            pass

    def log_message(self, *_):
        pass

    def answer(self, code, body):
        body = json.dumps(body).encode() if not isinstance(body, bytes) else body
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, code, message):
        self.answer(code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code})

    def do_GET(self):
        try:
            self.serve()
        except (OSError, ssl.SSLError):
            self.close_connection = True

    def serve(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        has_certificate = bool(self.request.getpeercert())
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not has_certificate and token not in tokens:
            with lock:
                counts["unauthorized"] += 1
            return self.refuse(401, "Unauthorized")
        if url.path not in PATHS:
            return self.refuse(404, "the server could not find the requested resource")
        kind = PATHS[url.path]
        if mode:
            return self.be_hostile()
        self.watch(kind, query) if query.get("watch") == "true" else self.list(kind, query)

    def be_hostile(self):
        if mode == "endless":
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 40))
            self.end_headers()
            while True:
                self.wfile.write(b" " * (1 << 16))
        if mode == "slow":
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            while True:
                self.wfile.write(b" ")
                time.sleep(0.01)
        if mode == "garbage":
            return self.answer(200, b"{]")
        if mode == "types":
            return self.answer(200, {"metadata": {"resourceVersion": "5"}, "items": [{"metadata": {"labels": 7}}]})
        if mode == "empty":
            # What a proxy may say that has lost its backend.
            return self.answer(200, b"")

    def list(self, kind, query):
        with lock:
            if "continue" in query:
                if query["continue"] not in lists:
                    counts["gone"] += 1
                    return self.refuse(410, "The provided continue parameter is too old")
                at, rest = lists.pop(query["continue"])
            else:
                at, rest = version, [json.loads(json.dumps(it)) for it in objects[kind].values()]
                counts["lists"] += 1
                selector = query.get("fieldSelector", "")
                if selector:
                    node = selector.removeprefix("spec.nodeName=")
                    rest = [it for it in rest if it.get("spec", {}).get("nodeName") == node]
                    counts["selected"] += 1
            page, rest = rest[:PAGE], rest[PAGE:]
            metadata = {"resourceVersion": str(at)}
            if rest:
                token = "%s/%d+%d=" % (kind, at, counts["pages"])
                lists[token] = (at, rest)
                metadata.update({"continue": token, "remainingItemCount": len(rest)})
            counts["pages"] += 1
        self.answer(200, {"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": page})

    def watch(self, kind, query):
        events = queue.Queue()
        with lock:
            after = int(query["resourceVersion"])
            if after < floor:
                counts["gone"] += 1
                return self.refuse(410, "too old resource version: %d (%d)" % (after, floor))
            for at, what, found in history[kind]:
                if at > after:
                    events.put((what, found))
            watches[kind].add(events)
            counts["watches"] += 1
        try:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while True:
                try:
                    what, found = events.get(timeout=0.2)
                except queue.Empty:
                    with lock:
                        if self.request not in connections:
                            return
                    # Notices a closed connection.
                    self.request.setblocking(False)
                    try:
                        if self.request.recv(1) == b"":
                            return
                    except ssl.SSLWantReadError:
                        pass
                    finally:
                        self.request.setblocking(True)
                    continue
                line = json.dumps({"type": what, "object": found}).encode() + b"\n"
                # In two pieces, as a network may cut them.
                for piece in (line[:7], line[7:]):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                if what == "ERROR":
                    self.wfile.write(b"0\r\n\r\n")
                    return
        finally:
            with lock:
                watches[kind].discard(events)
            self.close_connection = True


class ApiServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def finish_request(self, request, address):
        if down:
            return
        super().finish_request(request, address)

    def handle_error(self, *_):
        pass


tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.minimum_version = ssl.TLSVersion.TLSv1_3
tls.load_cert_chain(os.path.join(DIRECTORY, "server.crt"), os.path.join(DIRECTORY, "server.key"))
tls.load_verify_locations(os.path.join(DIRECTORY, "ca.crt"))
tls.verify_mode = ssl.CERT_OPTIONAL
server = ApiServer((ADDRESS, int(PORT)), Api)
server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
threading.Thread(target=ControlServer(CONTROL, Control).serve_forever, daemon=True).start()
print("serving", flush=True)
server.serve_forever()
