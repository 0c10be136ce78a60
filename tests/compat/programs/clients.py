"""Parts that several programs here share."""

import hashlib
import select
import sys
import threading


def digest_of(count, ask):
    """Has so many clients ask at the same time, each on a thread of its own: `ask(number)` returns a digest. Prints one over all."""
    digests = [None] * count

    def run(number):
        digests[number] = ask(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if None in digests:
        sys.exit("some clients had no answer")
    print(hashlib.md5("".join(digests).encode()).hexdigest())


def receive_by(call, connection):
    """Waits for bytes of a connection by a call (recv, poll or epoll), and returns up to 64 of them."""
    if call == "poll":
        waiter = select.poll()
        waiter.register(connection, select.POLLIN)
        assert waiter.poll()
    elif call == "epoll":
        waiter = select.epoll()
        waiter.register(connection, select.EPOLLIN)
        assert waiter.poll()
    return connection.recv(64)
