"""A sender with more bytes unread than TCP takes, whose receiver passes its descriptor on. The bytes go back to TCP, as far as it has room.

    returning.py PORT GATE STYLE END

STYLE is how the sender waits: poll, select, epoll, or edge (an epoll instance with EPOLLET). END is what it does before the receiver reads:
shut down (shut), close, exit without a close, or be killed (kill). With fork, a child of it sends more while the receiver reads. The two ends
exchange bytes until the file GATE exists. Prints whether the sender was busy while nothing could be sent, and whether the receiver has got
everything once and in order.
"""

import hashlib
import os
import select
import signal
import socket
import sys
import time


class Receiver:
    """A process that does what it is told by a pipe, and answers by another."""

    def __init__(self, port):
        self.orders_end, self.orders = os.pipe()
        self.answers_end, self.answers = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            self.run(port)
            os._exit(0)

    def tell(self, order):
        os.write(self.orders, order)

    def answer(self):
        return os.read(self.answers_end, 100)

    def run(self, port):
        sock = socket.create_connection(("127.0.0.1", port))
        while (byte := sock.recv(1)) == b".":
            sock.sendall(byte)
        assert os.read(self.orders_end, 1) == b"p"
        near, far = socket.socketpair()
        socket.send_fds(near, [b"x"], [sock.fileno()])
        os.write(self.answers, b"passed")
        assert os.read(self.orders_end, 1) == b"r"
        digest = hashlib.sha256()
        while chunk := sock.recv(65536):
            digest.update(chunk)
        os.write(self.answers, digest.hexdigest().encode())


class Wait:
    """Waits for a connection in one style."""

    def __init__(self, style, sock):
        self.style, self.sock = style, sock
        self.flags = select.EPOLLET if style == "edge" else 0
        if style in ("epoll", "edge"):
            self.set = select.epoll()
            self.set.register(sock, select.EPOLLOUT | self.flags)

    def is_ready(self, room, seconds):
        if self.style == "select":
            lists = ([], [self.sock], []) if room else ([self.sock], [], [])
            return any(select.select(*lists, seconds))
        if self.style == "poll":
            poll = select.poll()
            poll.register(self.sock, select.POLLOUT if room else select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        self.set.modify(self.sock, (select.EPOLLOUT if room else select.EPOLLIN) | self.flags)
        return bool(self.set.poll(seconds))


class Sender:
    def __init__(self, sock):
        self.sock, self.digest, self.count, self.refused = sock, hashlib.sha256(), 0, 0

    def send(self):
        block = b"%07d\n" % (self.count % 10_000_000) * 1024
        try:
            sent = self.sock.send(block)
        except BlockingIOError:
            self.refused += 1
            return
        self.digest.update(block[:sent])
        self.count += sent


class Process:
    """The sender. It ends as it is told, and leaves the digest of what it has sent."""

    def __init__(self, listener, gate, style, end):
        self.receiver = Receiver(listener.getsockname()[1])
        self.digest_end, digest = os.pipe()
        quit_end, self.quit = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(self.quit)
            sock, sender, wait = fill(listener, gate, style, self.receiver)
            if end in ("exit", "kill"):
                os.write(digest, sender.digest.hexdigest().encode())
                finish(sock, end)
            if end == "fork":
                self.receiver.tell(b"r")
                send_from_child(sock, sender)
                sock.close()
            else:
                finish(sock, end)
            os.write(digest, sender.digest.hexdigest().encode())
            os.read(quit_end, 1)
            os._exit(0)
        os.close(digest)


def fill(listener, gate, style, receiver):
    sock, _ = listener.accept()
    while not os.path.exists(gate):
        sock.sendall(b".")
        assert sock.recv(1) == b"."
        time.sleep(0.001)
    sock.sendall(b"!")
    sock.setblocking(False)
    sender, wait = Sender(sock), Wait(style, sock)
    while wait.is_ready(True, 0.5):
        sender.send()

    receiver.tell(b"p")
    assert receiver.answer() == b"passed"
    sender.refused = 0
    until = time.monotonic() + 1
    while time.monotonic() < until:
        if wait.is_ready(True, 0.1):
            sender.send()
    print("refused often:", sender.refused > 3)
    before, until = time.process_time(), time.monotonic() + 1
    while (left := until - time.monotonic()) > 0:
        wait.is_ready(False, left)
    print("busy:", time.process_time() - before > 0.2, flush=True)
    sock.setblocking(True)
    if wait.is_ready(True, 0):
        sender.send()
    return sock, sender, wait


def finish(sock, end):
    if end == "shut":
        sock.shutdown(socket.SHUT_WR)
    elif end == "close":
        sock.close()
    elif end == "exit":
        os._exit(0)
    elif end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def send_from_child(sock, sender):
    """A child sends more, while its parent waits for it."""
    last = b"the last words"
    child = os.fork()
    if child == 0:
        sock.sendall(last)
        os._exit(0)
    os.waitpid(child, 0)
    sender.digest.update(last)


def main(port, gate, style, end):
    with socket.create_server(("127.0.0.1", port)) as listener:
        sender = Process(listener, gate, style, end)
    digest = b""
    while chunk := os.read(sender.digest_end, 100):
        digest += chunk
        if end not in ("exit", "kill"):
            break
    if end != "fork":
        # Only now, when nothing more is called in the sender.
        sender.receiver.tell(b"r")
    print("whole:", sender.receiver.answer() == digest)
    os.close(sender.quit)
    os.waitpid(sender.child, 0)
    os.waitpid(sender.receiver.child, 0)


main(int(sys.argv[1]), *sys.argv[2:])
