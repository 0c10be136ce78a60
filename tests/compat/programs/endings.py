"""What a program sees when its peer ends: in every way that a process or a connection can end.

    endings.py observe DIR FIRST_PORT GROUP [gated]

For each scenario of the group the observer starts a subject as a process of its own, talks to it until the
connection is warm (with `gated`: until DIR/gate lists its port, which says that it is on shared memory), and gives
it the word. The subject then acts, and the observer notes what each of its own calls returns. Prints one JSON
line per scenario: what the observer noted, what the subject noted. Nothing that depends on time is noted.
"""

import errno
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

SETTLE = 0.06  # seconds for the kernel and the other process to get there
LIMIT = 8.0  # seconds before anything here counts as hung


def wait_for(condition, what):
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.005)


class Notes(list):
    """What calls returned, in order."""

    def call(self, name, function, *arguments):
        """Notes the result: bytes by their number and sum, errors by their name."""
        try:
            result = function(*arguments)
        except TimeoutError:
            result = "hung"
        except OSError as error:
            result = errno.errorcode[error.errno]
        if isinstance(result, bytes):
            result = f"{len(result)} bytes, sum {sum(result)}"
        self.append([name, result])

    def drain(self, sock):
        """Receives to the end, and twice past it; how the bytes were cut up is not noted."""
        data = b""
        ends = 0
        while ends < 3:
            try:
                part = sock.recv(65536)
                if part:
                    data += part
                    continue
                end = "end of file"
            except TimeoutError:
                end = "hung"
                ends = 3
            except OSError as error:
                end = errno.errorcode[error.errno]
            if ends == 0 or data:
                self.append(["received", len(data), sum(data)])
                data = b""
            self.append(["recv", end])
            ends += 1

    def poll(self, sock):
        poller = select.poll()
        poller.register(sock, select.POLLIN | select.POLLOUT | select.POLLRDHUP | select.POLLPRI)
        self.append(["poll", sum(bits for _, bits in poller.poll(0))])

    def epoll(self, sock, wanted=select.EPOLLIN | select.EPOLLRDHUP):
        with select.epoll() as poller:
            poller.register(sock, wanted)
            self.append(["epoll", sum(bits for _, bits in poller.poll(LIMIT))])

    def send_twice(self, sock):
        """The first may go through, and be answered by a reset; the second shows it."""
        for _ in range(2):
            self.call("send", sock.send, b"x" * 10)
            time.sleep(SETTLE)

    def error(self, sock):
        self.call("SO_ERROR", sock.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)

    def names(self, sock, port):
        for name, function in (("getsockname", sock.getsockname), ("getpeername", sock.getpeername)):
            try:
                self.append([name, "server" if function()[1] == port else "client"])
            except OSError as error:
                self.append([name, errno.errorcode[error.errno]])


# Actions of the subject ------------------------------------------------------------------------


def end_by(way):
    if way == "exit":
        sys.exit(0)
    if way == "_exit":
        os._exit(0)
    if way == "abort":
        os.abort()
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "segfault":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    if way == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LIMIT)


def die(talk, way, pending, slow=False):
    """Dies this way, with these bytes pending: unread at the peer, at itself, or both."""
    if pending in ("at_peer", "both"):
        for _ in range(3):
            talk.sock.sendall(bytes(range(250)) * 4)
    if pending in ("at_self", "both"):
        talk.wait_sign("sent")
    time.sleep(0.3 if slow else SETTLE)
    end_by(way)


def close(talk, pending):
    if pending in ("at_peer", "both"):
        talk.sock.sendall(bytes(range(250)) * 4)
    if pending in ("at_self", "both"):
        talk.wait_sign("sent")
    time.sleep(SETTLE)
    talk.sock.close()
    talk.sign("acted")
    talk.wait_sign("done")


def close_partly_read(talk):
    talk.wait_sign("sent")
    talk.notes.call("recv", talk.sock.recv, 10)
    talk.sock.close()
    talk.sign("acted")
    talk.wait_sign("done")


def linger_reset(talk):
    talk.sock.sendall(b"last words")
    talk.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    talk.sock.close()
    talk.sign("acted")
    talk.wait_sign("done")


def shut_down(talk, how):
    talk.sock.sendall(b"before")
    talk.sock.shutdown(how)
    talk.notes.call("send", talk.sock.send, b"after")
    talk.sign("acted")
    talk.wait_sign("done")
    time.sleep(SETTLE)
    talk.notes.drain(talk.sock)
    talk.notes.poll(talk.sock)
    talk.notes.names(talk.sock, talk.port)


def half_close_and_answer(talk):
    """The observer has half-closed: its question is read to the end, and answered."""
    talk.notes.drain(talk.sock)
    talk.notes.poll(talk.sock)
    talk.sock.sendall(bytes(range(256)) * 2000)
    talk.sock.close()


def execute(talk, inherit):
    if inherit:
        os.set_inheritable(talk.sock.fileno(), True)
    talk.sock.sendall(b"before exec")
    os.execv("/bin/sleep", ["sleep", "0.4"])


def fork_and_leave(talk):
    """The parent goes; the connection stays with the child, which has the last word."""
    if os.fork() == 0:
        time.sleep(0.2)
        talk.sock.sendall(b"from the child")
        talk.notes.call("recv", talk.sock.recv, 100)
        talk.finish()
        os._exit(0)
    os._exit(0)


def duplicate(talk):
    copy = os.dup(talk.sock.fileno())
    talk.sock.close()
    os.write(copy, b"by the copy")
    os.kill(os.getpid(), signal.SIGKILL)


def ignore(talk):
    """Reads nothing for a while, so that the peer blocks in send, then dies."""
    time.sleep(0.5)
    end_by("kill")


def stop_and_kill(talk):
    """Stopped is not dead: only when it is killed the peer may see an end."""
    talk.sign("acted")
    os.kill(os.getpid(), signal.SIGSTOP)


# Actions of the observer -----------------------------------------------------------------------


def late(talk):
    """Looks when all is over."""
    talk.over()
    for step in (talk.notes.poll, talk.notes.drain, talk.notes.send_twice, talk.notes.poll, talk.notes.error):
        step(talk.sock)
    talk.notes.names(talk.sock, talk.port)


def late_at_an_open_end(talk):
    """Nothing has ended for the observer: it may go on sending."""
    talk.over()
    talk.notes.poll(talk.sock)
    talk.notes.call("recv", talk.sock.recv, 100)
    talk.sock.settimeout(0.3)
    talk.notes.call("recv", talk.sock.recv, 100)
    talk.notes.send_twice(talk.sock)
    talk.notes.poll(talk.sock)
    talk.notes.error(talk.sock)


def late_sending_first(talk):
    talk.over()
    talk.notes.send_twice(talk.sock)
    talk.notes.poll(talk.sock)
    talk.notes.drain(talk.sock)


def late_asking_first(talk):
    talk.over()
    talk.notes.error(talk.sock)
    talk.notes.drain(talk.sock)


def give(then):
    """Sends bytes that the subject will not read, then goes on."""

    def act(talk):
        talk.sock.sendall(bytes(range(100)) * 10)
        talk.sign("sent")
        then(talk)

    return act


def blocked_in_recv(talk):
    talk.notes.drain(talk.sock)
    talk.over()
    talk.notes.send_twice(talk.sock)


def blocked_in_poll(talk):
    poller = select.poll()
    poller.register(talk.sock, select.POLLIN)
    talk.notes.append(["poll", sum(bits for _, bits in poller.poll(LIMIT * 1000))])
    talk.over()
    talk.notes.drain(talk.sock)


def blocked_in_select(talk):
    ready = select.select([talk.sock], [], [talk.sock], LIMIT)
    talk.notes.append(["select", len(ready[0]), len(ready[2])])
    talk.over()
    talk.notes.drain(talk.sock)


def blocked_in_epoll(talk):
    talk.notes.epoll(talk.sock)
    talk.over()
    talk.notes.epoll(talk.sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP)
    talk.notes.drain(talk.sock)


def blocked_in_edge_epoll(talk):
    """Each change is told once; what came between the changes is not noted, as it depends on time."""
    talk.sock.setblocking(False)
    seen, data, end = 0, 0, None
    with select.epoll() as poller:
        poller.register(talk.sock, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        while end is None:
            events = poller.poll(LIMIT)
            if not events:
                end = "hung"
            for _, bits in events:
                seen |= bits
                try:
                    while part := talk.sock.recv(300):
                        data += len(part)
                    end = "end of file"
                except BlockingIOError:
                    pass
                except OSError as error:
                    end = errno.errorcode[error.errno]
    talk.notes.append(["edge", seen & ~select.EPOLLIN, data, end])


def blocked_in_send(talk):
    def fill():
        while True:
            talk.sock.send(b"y" * 65536)

    talk.notes.call("send until it fails", fill)
    talk.over()
    talk.notes.drain(talk.sock)
    talk.notes.send_twice(talk.sock)


def shut_down_under_a_blocked_recv(talk):
    """Another thread of the same program shuts the socket down."""
    threading.Timer(0.2, lambda: talk.sock.shutdown(socket.SHUT_RDWR)).start()
    talk.notes.drain(talk.sock)
    talk.sign("done")


def half_close_and_read(talk):
    talk.sock.sendall(b"question" * 1000)
    talk.sock.shutdown(socket.SHUT_WR)
    talk.notes.drain(talk.sock)


def nothing_while_stopped(talk):
    talk.wait_sign("acted")
    time.sleep(SETTLE)
    talk.notes.poll(talk.sock)
    talk.sock.settimeout(0.3)
    talk.notes.call("recv", talk.sock.recv, 10)
    talk.sock.settimeout(LIMIT)
    talk.process.kill()
    late(talk)


def answer_the_child(talk):
    talk.process.wait()
    talk.notes.call("recv", talk.sock.recv, 100)
    talk.notes.call("send", talk.sock.send, b"answer")
    talk.notes.drain(talk.sock)


def deaths():
    for way in ("exit", "_exit", "abort", "kill", "segfault", "term"):
        for pending in ("none", "at_peer", "at_self", "both"):
            look = give(late) if pending in ("at_self", "both") else late
            yield f"{way}, {pending}", lambda talk, w=way, p=pending: die(talk, w, p), look


def watchers():
    looks = (late_sending_first, late_asking_first, blocked_in_recv, blocked_in_poll, blocked_in_select,
             blocked_in_epoll, blocked_in_edge_epoll)
    for look in looks:
        for pending in ("none", "at_self", "both"):
            act = give(look) if pending != "none" else look
            # A watcher of `both` sees the data first. Whether it sees the end at the same time
            # depends on timing.
            if pending == "both" and look.__name__.startswith("blocked"):
                continue
            yield f"{look.__name__}, {pending}", lambda talk, p=pending: die(talk, "kill", p, True), act
    yield "blocked_in_send", ignore, blocked_in_send


def closes():
    for pending in ("none", "at_peer", "at_self", "both"):
        look = give(late) if pending in ("at_self", "both") else late
        yield f"close, {pending}", lambda talk, p=pending: close(talk, p), look
    yield "close, partly read", close_partly_read, give(late)
    yield "linger 0", linger_reset, late
    for name in ("SHUT_RD", "SHUT_WR", "SHUT_RDWR"):
        how = getattr(socket, name)
        look = late_at_an_open_end if name == "SHUT_RD" else late
        yield f"{name}", lambda talk, h=how: shut_down(talk, h), look
        yield f"{name}, unread", lambda talk, h=how: (talk.wait_sign("sent"), shut_down(talk, h)), give(look)
    yield "half-close and answer", half_close_and_answer, half_close_and_read
    yield "shut down under a blocked recv", lambda talk: talk.wait_sign("done"), shut_down_under_a_blocked_recv
    yield "exec", lambda talk: execute(talk, False), blocked_in_recv
    yield "exec, inherited", lambda talk: execute(talk, True), late
    yield "fork", fork_and_leave, answer_the_child
    yield "dup", duplicate, late
    yield "stopped, then killed", stop_and_kill, nothing_while_stopped


GROUPS = {"deaths": deaths, "watchers": watchers, "closes": closes}


class Talk:
    """One scenario, at either end."""

    def __init__(self, directory, index, port, sock=None, process=None):
        self.directory, self.index, self.port = directory, index, port
        self.sock, self.process, self.notes = sock, process, Notes()

    def path(self, name):
        return os.path.join(self.directory, f"{self.port}.{name}")

    def sign(self, name):
        open(self.path(name), "w").close()

    def wait_sign(self, name):
        wait_for(lambda: os.path.exists(self.path(name)), name)

    def over(self):
        """Waits until the subject has acted, or is dead, without reaping it."""

        def gone():
            options = os.WEXITED | os.WNOWAIT | os.WNOHANG
            return os.path.exists(self.path("acted")) or os.waitid(os.P_PID, self.process.pid, options)

        wait_for(gone, "the subject's end")
        time.sleep(SETTLE)

    def finish(self):
        """The subject leaves its notes."""
        with open(self.path("notes"), "w") as file:
            json.dump(self.notes, file)


def subject(directory, group, index, port):
    _, act, _ = list(GROUPS[group]())[index]
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(LIMIT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        talk = Talk(directory, index, port, sock)
        while sock.recv(1) == b"?":
            sock.send(b"!")
        act(talk)
        talk.finish()


def is_gated(directory, port):
    try:
        with open(os.path.join(directory, "gate")) as file:
            return str(port) in file.read().split()
    except FileNotFoundError:
        return False


def observe(directory, first_port, group, gated):
    for index, (name, _, look) in enumerate(GROUPS[group]()):
        port = first_port + index
        with socket.create_server(("127.0.0.1", port)) as listener:
            command = [sys.executable, __file__, "subject", directory, group, str(index), str(port)]
            process = subprocess.Popen(command)
            sock, _ = listener.accept()
        sock.settimeout(LIMIT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        talk = Talk(directory, index, port, sock, process)
        end = time.monotonic() + LIMIT
        rounds = 0
        while rounds < 10 or (gated and not is_gated(directory, port)):
            sock.send(b"?")
            sock.recv(1)
            rounds += 1
            time.sleep(0.002)
            if time.monotonic() > end:
                talk.notes.append("never came onto shared memory")
                break
        sock.send(b".")
        try:
            look(talk)
        except Exception as error:  # a scenario that breaks is told as one; the others go on
            talk.notes.append(f"{type(error).__name__}: {error}")
        talk.sign("done")
        sock.close()
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            status = "hung"
        try:
            # After "fork", the child outlives the subject, whose end was waited for above.
            if name == "fork":
                wait_for(lambda: os.path.exists(talk.path("notes")), "the child's notes")
            with open(talk.path("notes")) as file:
                told = json.load(file)
        except (FileNotFoundError, TimeoutError):
            told = None
        print(json.dumps({"scenario": name, "observer": talk.notes, "subject": told, "status": status}), flush=True)


def main():
    role, directory = sys.argv[1:3]
    if role == "observe":
        observe(directory, int(sys.argv[3]), sys.argv[4], sys.argv[5:] == ["gated"])
    else:
        subject(directory, sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))


main()
