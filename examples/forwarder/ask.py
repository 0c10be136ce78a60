"""Sets and reads values through the forwarder, by one connection."""

import socket
import sys

COUNT = 2000

with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answers = connection.makefile("rb")
    for number in range(COUNT):
        value = str(number).encode()
        connection.sendall(b"set key-%d 0 0 %d\r\n%s\r\n" % (number % 100, len(value), value))
        assert answers.readline() == b"STORED\r\n"
        connection.sendall(b"get key-%d\r\n" % (number % 100))
        assert answers.readline().startswith(b"VALUE ")
        assert answers.readline() == value + b"\r\n"
        assert answers.readline() == b"END\r\n"
print(2 * COUNT, "answers")
