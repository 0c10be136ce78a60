"""A connection for which several wait in turn, each leaving it before the next: epoll sets, threads in poll and in recv.

taking_turns.py server PORT DIRECTORY WAIT...    WAIT: a or b (an epoll set), poll, recv, left (it goes from one set to another, and is
                                                 in both for a while), aside (it comes into a set while a thread waits in recv)
taking_turns.py client PORT
"""

import os
import select
import socket
import sys
import threading
import time

USED = 300
TURNS = 100


class Turns:
    """The ways to wait for the connection."""

    def __init__(self, connection):
        self.connection = connection
        self.sets = {"A": select.epoll(), "B": select.epoll()}

    def a(self):
        self.by_set("A")

    def b(self):
        self.by_set("B")

    def by_set(self, name):
        self.sets[name].register(self.connection, select.EPOLLIN)
        self.answer_by(name)
        self.sets[name].unregister(self.connection)

    def answer_by(self, name):
        assert self.sets[name].poll(10), "nothing came"
        self.answer()

    def poll(self):
        waiter = select.poll()
        waiter.register(self.connection, select.POLLIN)
        assert waiter.poll(10_000), "nothing came"
        self.answer()

    def recv(self):
        self.answer()

    def left(self):
        """The connection goes from one set to the other, and is in both for a while."""
        self.sets["A"].register(self.connection, select.EPOLLIN)
        self.sets["B"].register(self.connection, select.EPOLLIN)
        self.sets["A"].unregister(self.connection)
        self.answer_by("B")
        self.sets["B"].unregister(self.connection)

    def aside(self):
        """It comes into a set while a thread waits for it, which then waits no more."""
        question = self.connection.recv(64)
        thread = threading.Thread(target=self.answer)
        thread.start()
        time.sleep(0.005)
        self.sets["A"].register(self.connection, select.EPOLLIN)
        self.connection.sendall(question)
        thread.join()
        for _ in range(10):
            self.answer_by("A")
        self.sets["A"].unregister(self.connection)

    def answer(self):
        self.connection.sendall(self.connection.recv(64))


def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)


def serve(port, directory, waits):
    listener = socket.create_server(("127.0.0.1", port))
    print("listening", flush=True)
    connection = listener.accept()[0]
    turns = Turns(connection)
    for _ in range(USED):
        turns.answer()
    print("used", flush=True)
    wait_for(f"{directory}/go")
    for turn in range(TURNS):
        getattr(turns, waits[turn % len(waits)])()
    print("done", flush=True)
    wait_for(f"{directory}/end")


def main():
    role, port, *rest = sys.argv[1:]
    if role == "server":
        serve(int(port), rest[0], rest[1:])
        return
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        connection.sendall(b"question")
        answers = 0
        while answer := connection.recv(64):
            answers += 1
            if answers > USED:
                # Let the server sleep.
                time.sleep(0.002)
            connection.sendall(answer)


main()
