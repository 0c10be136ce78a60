"""An echo whose client comes late for the first answer, and in good time for the others.

    late.py serve PORT
    late.py ask PORT LATE SECONDS EXCHANGES FILE

It ends once FILE is there. Before, the two exchange something by another connection, so that they share memory when this one begins.
"""
import os
import socket
import sys
import time

BEFORE = 30

role, port = sys.argv[1], int(sys.argv[2])
if role == "serve":
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("listening", flush=True)
        other, _ = listener.accept()
        for _ in range(BEFORE):
            other.sendall(other.recv(4096))
        connection, _ = listener.accept()
    with connection:
        while data := connection.recv(4096):
            connection.sendall(data)
else:
    late, good_time, exchanges = float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    other = socket.create_connection(("127.0.0.1", port))
    for _ in range(BEFORE):
        other.sendall(b"before")
        assert other.recv(4096) == b"before"
        time.sleep(0.01)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for number in range(exchanges):
            message = b"%6d" % number
            connection.sendall(message)
            time.sleep(late if number == 0 else good_time)
            answer = connection.recv(4096)
            assert answer == message, (answer, message)
        print("every answer came", flush=True)
        while not os.path.exists(sys.argv[6]):
            time.sleep(0.02)
