"""Clients of running.c, and of servers of memcached's and Redis' protocols: so many connections that
ask and check the answers until a file exists.

running.py PORT CONNECTIONS FILE [successor | memcached | redis | java]
"""

import os
import socket
import struct
import sys
import threading

port, count, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
style = sys.argv[4] if len(sys.argv) > 4 else "successor"
asked = [0] * count
wrong = []


def exactly(connection, length):
    parts = b""
    while len(parts) < length:
        part = connection.recv(length - len(parts))
        if not part:
            raise EOFError("the connection has ended")
        parts += part
    return parts


def exchange(connection, number, turn):
    text = b"%d.%d." % (number, turn) + b"x" * (turn % 300)
    if style == "successor":
        request, expected = text, bytes((byte + 1) % 256 for byte in text)
    elif style == "java":
        request = expected = struct.pack(">i", len(text)) + text
    elif style == "redis":
        request, expected = b"ECHO %s\r\n" % text, b"$%d\r\n%s\r\n" % (len(text), text)
    else:
        # Other clients of the server have other keys.
        key = b"%d.%d" % (os.getpid(), number)
        request = b"set %s 0 0 %d\r\n%s\r\nget %s\r\n" % (key, len(text), text, key)
        expected = b"STORED\r\nVALUE %s 0 %d\r\n%s\r\nEND\r\n" % (key, len(text), text)
    connection.sendall(request)
    answer = exactly(connection, len(expected))
    if answer != expected:
        raise ValueError("%r to %r" % (answer, request))


def ask(number):
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(20)
            while not (asked[number] and os.path.exists(end)):
                exchange(connection, number, asked[number])
                asked[number] += 1
    except Exception as error:
        wrong.append("%d after %d: %r" % (number, asked[number], error))


threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(wrong) or "right")
sys.exit(1 if wrong or not all(asked) else 0)
