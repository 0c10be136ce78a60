"""Sockets and epoll sets: what was done with a socket before it is connected must hold afterwards, and what is in a set that is
watched must be seen through it.

    sockets_and_sets.py PORT GROUP

Every scenario of the group connects to a listener of its own in this process, from PORT on, and prints a line.
"""

import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time

PATIENCE = 2.0
READER = """
import os, select, sys
fd = int(sys.argv[1])
sys.stdin.readline()
print(os.read(fd, 3) if select.select([fd], [], [], 2.0)[0] else "nothing", flush=True)
"""


class Pair:
    """A client that is not connected yet, and its listener."""

    def __init__(self, port):
        self.listener = socket.create_server(("127.0.0.1", port))
        self.address = self.listener.getsockname()
        self.client = socket.socket()
        self.server = None

    def connect(self, client=None, prepare=lambda: None):
        client = client or self.client
        try:
            client.connect(self.address)
        except BlockingIOError:
            select.select([], [client], [])
        self.server, _ = self.listener.accept()
        for one in (client, self.server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prepare()
        for _ in range(60):
            client.sendall(b"x" * 10)
            self.server.recv(10, socket.MSG_WAITALL)
            self.server.sendall(b"y" * 10)
            receive(client, 10)
            time.sleep(0.001)

    def greet(self):
        self.server.sendall(b"hello")
        time.sleep(0.05)


def receive(sock, count):
    got = b""
    while len(got) < count:
        if not select.select([sock], [], [], PATIENCE)[0]:
            return got
        part = sock.recv(count - len(got))
        if not part:
            return got
        got += part
    return got


def told(epoll, timeout=0.1):
    return sorted(hex(events) for _, events in epoll.poll(timeout))


def attempt(call, *arguments):
    try:
        call(*arguments)
        return 0
    except OSError as error:
        return error.errno


def used_again(pair, events, duplicate, connected):
    """A number that is in an epoll set is closed, and becomes another socket's."""
    epoll = select.epoll()
    if connected:
        pair.connect()
        first = pair.server
    number = pair.client.fileno()
    epoll.register(number, events)
    kept = os.dup(number) if duplicate else None
    pair.client.close()
    pair.client = socket.socket()
    assert pair.client.fileno() == number
    pair.connect()
    pair.greet()
    yield [told(epoll, 0.2)]
    yield attempt(epoll.modify, number, select.EPOLLIN), attempt(epoll.unregister, number)
    yield attempt(epoll.register, number, select.EPOLLIN), attempt(epoll.register, number, select.EPOLLIN)
    yield "0x1" in told(epoll)
    yield receive(pair.client, 5), told(epoll)
    if connected:
        first.sendall(b"to the first")
        time.sleep(0.05)
        yield told(epoll), os.read(kept, 20)
    if duplicate:
        os.close(kept)
    yield attempt(epoll.modify, number, select.EPOLLIN), attempt(epoll.unregister, number)
    pair.greet()
    yield told(epoll), receive(pair.client, 5)


def duplicated(pair, registered, connecting, closed):
    """One of two names connects the socket, and either is used."""
    names = {"first": pair.client, "second": pair.client.dup()}
    epoll = select.epoll()
    epoll.register(names[registered], select.EPOLLIN)
    pair.connect(names[connecting])
    if closed:
        names.pop(closed).close()
    pair.greet()
    for name in names.values():
        yield told(epoll), receive(name, 2)
    for name in names.values():
        name.sendall(b"thanks")
    yield receive(pair.server, 6 * len(names))
    pair.server.close()
    yield told(epoll)


def twins(pair, early, ours, others):
    """A socket and its duplicate are in one set, each for events of its own, from before or after shared memory."""
    epoll, names = select.epoll(), {}

    def register():
        names.update({pair.client.fileno(): "first", os.dup(pair.client.fileno()): "second"})
        for number, events in zip(names, (ours, others)):
            epoll.register(number, events)

    def told(timeout=0.1):
        return [(names[number], hex(events)) for number, events in epoll.poll(timeout)]

    pair.connect(prepare=register if early else lambda: None)
    if not early:
        register()
    first, second = names
    yield told()
    for _ in range(3):
        pair.greet()
        yield told(), told(), receive(pair.client, 2), told(), os.read(second, 10), told()
    yield attempt(epoll.register, second, select.EPOLLIN)
    epoll.modify(second, select.EPOLLIN | select.EPOLLOUT)
    yield sorted(told())
    epoll.modify(first, 0)
    pair.greet()
    yield told()
    epoll.modify(first, select.EPOLLIN)
    yield sorted(told())
    epoll.unregister(first)
    yield told(), attempt(epoll.unregister, first), attempt(epoll.modify, first, 0)
    epoll.register(first, select.EPOLLIN | select.EPOLLET)
    yield sorted(told()), told()
    pair.greet()
    yield sorted(told()), receive(pair.client, 10)
    epoll.unregister(second)
    os.close(second)
    pair.greet()
    yield told(), told(), receive(pair.client, 5)
    pair.server.close()
    yield told()


def closed_twin(pair, closed):
    """One of two registered numbers is closed: its registration stays, and nobody can change it."""
    epoll = select.epoll()
    pair.connect()
    names = {"first": pair.client, "second": pair.client.dup()}
    for one in names.values():
        epoll.register(one, select.EPOLLIN)
    numbers = {one.fileno(): name for name, one in names.items()}
    gone = names.pop(closed)
    number = gone.fileno()
    pair.greet()
    yield sorted(numbers[one] for one, _ in epoll.poll(PATIENCE))
    gone.close()
    (kept,) = names.values()
    for _ in range(2):
        yield sorted(numbers[one] for one, _ in epoll.poll(PATIENCE)), receive(kept, 5)
        yield epoll.poll(0), attempt(epoll.modify, number, 0), attempt(epoll.unregister, number)
        pair.greet()
    yield sorted(numbers[one] for one, _ in epoll.poll(PATIENCE)), receive(kept, 5)
    epoll.unregister(kept)
    pair.server.close()
    yield [numbers[one] for one, _ in epoll.poll(PATIENCE)], kept.recv(1)
    kept.close()


def twin_that_waits(pair):
    """Round trips, of which each is waited for in a set that has both numbers, one of them for room only."""
    epoll = select.epoll()
    numbers = []

    def register():
        numbers.append(os.dup(pair.client.fileno()))
        epoll.register(pair.client, select.EPOLLIN)
        epoll.register(numbers[0], select.EPOLLOUT | select.EPOLLET)

    pair.connect(prepare=register)
    epoll.poll(PATIENCE)
    for _ in range(500):
        pair.server.sendall(b"x" * 1000)
        if [one for one, _ in epoll.poll(PATIENCE)] != [pair.client.fileno()]:
            yield "told wrongly"
        receive(pair.client, 1000)
    yield told(epoll, 0)


def nested(pair):
    inner, outer = select.epoll(), select.epoll()
    outer.register(inner, select.EPOLLIN)
    inner.register(pair.client, select.EPOLLIN)
    pair.connect()
    yield told(outer)
    pair.greet()
    yield told(outer), told(inner), receive(pair.client, 5)


def few_places(pair):
    """The array has room for less than there is: a lane that is never read leaves their turn to a listener and to its own hang-up."""
    pair.connect()
    epoll, waiting = select.epoll(), socket.create_server(("127.0.0.1", 0))
    names = {pair.client.fileno(): "lane", waiting.fileno(): "listener"}
    epoll.register(pair.client, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP)
    epoll.register(waiting, select.EPOLLIN)
    for step in (pair.greet, lambda: pair.server.shutdown(socket.SHUT_WR), pair.server.close):
        step()
        with socket.create_connection(waiting.getsockname()):
            turns = [event for _ in range(100) for event in epoll.poll(PATIENCE, 1)]
            yield sorted({(names[number], hex(events)) for number, events in turns})
            for _ in range(100):
                told = [names[number] for number, _ in epoll.poll(PATIENCE, 3)]
                if len(told) > len(set(told)):
                    yield "told twice in one wait"
            waiting.accept()[0].close()
    yield receive(pair.client, 5)


def exclusive(pair):
    epoll = select.epoll()
    epoll.register(pair.client, select.EPOLLIN | select.EPOLLEXCLUSIVE)
    pair.connect()
    pair.greet()
    yield told(epoll), receive(pair.client, 5)


def exclusive_servers(pair):
    """Several sets have the connection so, as those of a server's threads do: one at least is told."""
    pair.connect()
    sets = [select.epoll() for _ in range(3)]
    for events in (select.EPOLLIN | select.EPOLLRDHUP, select.EPOLLIN | select.EPOLLONESHOT):
        yield attempt(sets[0].register, pair.client, events | select.EPOLLEXCLUSIVE)
    for one in sets:
        one.register(pair.client, select.EPOLLIN | select.EPOLLET | select.EPOLLEXCLUSIVE)
    yield attempt(sets[0].register, pair.client, select.EPOLLIN), attempt(sets[0].modify, pair.client, select.EPOLLIN)
    for _ in range(500):
        pair.server.sendall(b"x" * 1000)
        if not any(told(one, 1) for one in sets):
            yield "nobody is told"
        receive(pair.client, 1000)
        for one in sets:
            told(one, 0)
    sets[0].unregister(pair.client)
    sets[0].register(pair.client, select.EPOLLIN)
    pair.greet()
    yield told(sets[0]), attempt(sets[0].modify, pair.client, select.EPOLLOUT), told(sets[0])
    yield receive(pair.client, 5)


def sent_on(pair):
    """Another descriptor of the socket comes by a message, and its reader has never seen it made."""
    near, far = socket.socketpair()
    socket.send_fds(near, [b"x"], [pair.client.fileno()])
    _, (other,), _, _ = socket.recv_fds(far, 1, 1)
    pair.connect()
    pair.greet()
    yield select.select([other], [], [], PATIENCE)[0] == [other] and os.read(other, 3), receive(pair.client, 2)


def inherited(pair, start):
    """Another program has the socket, and reads from it."""
    number = pair.client.fileno()
    os.set_inheritable(number, True)
    child = start([sys.executable, "-c", READER, str(number)])
    pair.connect()
    pair.greet()
    child.stdin.write(b"go\n")
    child.stdin.flush()
    yield child.stdout.readline(), child.wait(), receive(pair.client, 2)
    pair.client.close()
    yield receive(pair.server, 1)


def by_vfork(command):
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)


def by_name(command):
    number = int(command[-1])
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[number])


def forked(pair, child_connects):
    """Both have it after a fork, whoever connects it."""
    near, far = socket.socketpair(type=socket.SOCK_SEQPACKET)
    pid = os.fork()
    here = near if pid else far
    if child_connects == (pid == 0):
        pair.connect()
        pair.greet()
        here.send(b"connected")
    else:
        here.recv(20)
    if pid == 0:
        far.send(receive(pair.client, 3))
        far.recv(20)
        os._exit(0)
    yield near.recv(20), receive(pair.client, 2)
    near.send(b"over")
    yield os.waitpid(pid, 0)[1]


def option(pair, prepare, use):
    prepare(pair.client)
    pair.connect()
    if use is not wait_for_more:
        pair.greet()
    pair.greet()
    yield from use(pair.client)


def announced(pair):
    signals = []
    signal.signal(signal.SIGIO, lambda *_: signals.append(1))
    fcntl.fcntl(pair.client, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pair.client, fcntl.F_SETFL, fcntl.fcntl(pair.client, fcntl.F_GETFL) | os.O_ASYNC)
    pair.connect()
    signals.clear()
    pair.greet()
    yield len(signals) > 0, receive(pair.client, 5)
    signal.signal(signal.SIGIO, signal.SIG_IGN)


def wait_for_more(client):
    yield select.select([client], [], [], 0.05)[0] == []
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    yield receive(client, 5)


def stamped(client):
    data, control, _, _ = client.recvmsg(5, 100)
    yield data, len(control)


def timed(client):
    yield receive(client, 10), attempt(client.recv, 1)


def shut(pair):
    """The kernel remembers what was shut down although the call has failed."""
    yield attempt(pair.client.shutdown, socket.SHUT_RD)
    pair.client.connect(pair.address)
    pair.server, _ = pair.listener.accept()
    for _ in range(60):
        pair.client.sendall(b"x")
        pair.server.recv(1)
        time.sleep(0.001)
    yield pair.client.recv(5)
    pair.client.sendall(b"last")
    yield receive(pair.server, 4)


def by_poll(inner):
    poll = select.poll()
    poll.register(inner, select.POLLIN)
    return lambda: [events for _, events in poll.poll(0)]


def by_select(inner):
    return lambda: select.select([inner], [], [], 0)[0] == [inner]


def by_epoll(inner):
    outer = select.epoll()
    outer.register(inner, select.EPOLLIN)
    return lambda: told(outer, 0)


def by_two(inner):
    middle = select.epoll()
    middle.register(inner, select.EPOLLIN)
    look = by_epoll(middle)
    return lambda: (look(), told(middle, 0))


def watched(pair, watch, events):
    """Bytes are there before the set is watched."""
    pair.connect()
    inner = select.epoll()
    inner.register(pair.client, events)
    yield told(inner, 0)
    pair.server.sendall(b"x" * 1000)
    time.sleep(0.05)
    look = watch(inner)
    yield look()
    yield told(inner, 0), look(), told(inner, 0)
    yield len(receive(pair.client, 400)), look(), told(inner, 0)
    yield len(receive(pair.client, 600)), look(), told(inner, 0), look()
    pair.server.sendall(b"more")
    time.sleep(0.05)
    yield look(), told(inner, 0), receive(pair.client, 4), look(), told(inner, 0)
    pair.server.close()
    time.sleep(0.05)
    yield look(), told(inner, 0)


def registered_late(pair, events, nested):
    """Bytes are there before the registration."""
    pair.connect()
    inner, outer = select.epoll(), select.epoll()
    if nested:
        outer.register(inner, select.EPOLLIN)
    pair.server.sendall(b"x" * 1000)
    time.sleep(0.05)
    inner.register(pair.client, events)
    yield told(outer, 0), told(inner, 0)
    yield len(receive(pair.client, 400)), told(outer, 0), told(inner, 0)
    yield len(receive(pair.client, 600)), told(outer, 0), told(inner, 0)
    pair.server.sendall(b"more")
    time.sleep(0.05)
    yield told(outer, 0), told(inner, 0), receive(pair.client, 4), told(inner, 0)
    try:
        inner.modify(pair.client, select.EPOLLIN)
    except OSError as error:
        yield error.errno
    inner.unregister(pair.client)
    pair.client.sendall(b"back")
    yield receive(pair.server, 4)


WAYS = {"poll": by_poll, "select": by_select, "a set": by_epoll, "two sets": by_two}
EVENTS = {"level": select.EPOLLIN, "edge": select.EPOLLIN | select.EPOLLET}
EVENTS["one-shot"] = select.EPOLLIN | select.EPOLLONESHOT
SHORT = struct.pack("ll", 0, 50000)
GROUPS = {
    "used-again": {
        "closed": lambda pair: used_again(pair, select.EPOLLIN, False, False),
        "closed, one-shot": lambda pair: used_again(pair, select.EPOLLIN | select.EPOLLONESHOT, False, False),
        "duplicate, one-shot": lambda pair: used_again(pair, select.EPOLLIN | select.EPOLLONESHOT, True, False),
        "connected, duplicate": lambda pair: used_again(pair, select.EPOLLIN, True, True),
        "connected, duplicate, edges": lambda pair: used_again(pair, select.EPOLLIN | select.EPOLLET, True, True),
    },
    "duplicated": {
        f"{registered} in a set, {connecting} connects, {closed} closed": lambda pair, names=(
            registered,
            connecting,
            closed,
        ): duplicated(pair, *names)
        for registered in ("first", "second")
        for connecting in ("first", "second")
        for closed in (None, "first", "second")
    },
    "twins": {
        f"{'early' if early else 'late'}, {ours}, {others}": lambda pair, early=early, ours=ours, others=others: twins(
            pair, early, ours, others
        )
        for early in (False, True)
        for ours in (select.EPOLLIN, select.EPOLLIN | select.EPOLLET)
        for others in (select.EPOLLIN, select.EPOLLOUT | select.EPOLLET, select.EPOLLIN | select.EPOLLET)
    },
    "closed-twins": {closed: lambda pair, closed=closed: closed_twin(pair, closed) for closed in ("first", "second")},
    "waiting-twin": {"a duplicate for room": twin_that_waits},
    "others": {
        "nested sets": nested,
        "an exclusive registration": exclusive,
        "sent on": sent_on,
        "inherited by a child of vfork": lambda pair: inherited(pair, by_vfork),
        "inherited by name": lambda pair: inherited(pair, by_name),
        "forked, the parent connects": lambda pair: forked(pair, False),
        "forked, the child connects": lambda pair: forked(pair, True),
        "shut down": shut,
    },
    "few-places": {"fewer than there is to tell": few_places},
    "exclusive": {"of several sets": exclusive_servers},
    "options": {
        "O_ASYNC": announced,
        "SO_RCVLOWAT": lambda pair: option(
            pair, lambda one: one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 10), wait_for_more
        ),
        "SO_TIMESTAMP": lambda pair: option(
            pair, lambda one: one.setsockopt(socket.SOL_SOCKET, 29, 1), stamped
        ),
        "SO_RCVTIMEO": lambda pair: option(
            pair, lambda one: one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, SHORT), timed
        ),
        "O_NONBLOCK": lambda pair: option(pair, lambda one: os.set_blocking(one.fileno(), False), timed),
    },
}
GROUPS["watched"] = {
    f"{way}, {how}": lambda pair, way=way, how=how: watched(pair, WAYS[way], EVENTS[how])
    for way in WAYS
    for how in EVENTS
} | {
    f"registered late, {how}, {nested}": lambda pair, how=how, nested=nested: registered_late(pair, how, nested)
    for how in (
        select.EPOLLIN,
        select.EPOLLIN | select.EPOLLEXCLUSIVE,
        select.EPOLLIN | select.EPOLLET | select.EPOLLEXCLUSIVE,
    )
    for nested in (False, True)
}


def main():
    port, group = int(sys.argv[1]), GROUPS[sys.argv[2]]
    for number, (name, scenario) in enumerate(group.items()):
        pair = Pair(port + number)
        print(name, *scenario(pair), sep=": ", flush=True)
        for one in filter(None, (pair.client, pair.server, pair.listener)):
            one.close()


main()
