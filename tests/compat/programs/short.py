"""Many short connections, one after another: each is closed after so many exchanges.

    short.py server PORT CONNECTIONS
    short.py client PORT CONNECTIONS EXCHANGES [SECONDS]    waits so long before each exchange
    short.py refused PORT CONNECTIONS       connects without waiting where nobody listens, and reads to find out
    short.py early PORT CONNECTIONS         reads some times before there is anything to read
"""
import select
import socket
import sys
import time

role, port, connections = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if role == "server":
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    print("listening", flush=True)
    for _ in range(connections):
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(4096):
                connection.sendall(data)
elif role == "refused":
    for _ in range(connections):
        with socket.socket() as connection:
            connection.setblocking(False)
            try:
                connection.connect(("127.0.0.1", port))
            except (BlockingIOError, ConnectionRefusedError):
                pass
            select.select([], [connection], [])
            try:
                raise SystemExit(f"read {connection.recv(1)}")
            except ConnectionRefusedError:
                pass
    print("done")
elif role == "early":
    for _ in range(connections):
        with socket.create_server(("127.0.0.1", port)) as listener:
            ours = socket.create_connection(("127.0.0.1", port))
            theirs, _ = listener.accept()
        with ours, theirs:
            for connection in 8 * [ours, theirs]:
                try:
                    raise SystemExit(f"read {connection.recv(1, socket.MSG_DONTWAIT)}")
                except BlockingIOError:
                    pass
            for _ in range(100):
                ours.sendall(b"there")
                theirs.sendall(theirs.recv(4096))
                ours.recv(4096)
else:
    pause = float(sys.argv[5]) if len(sys.argv) > 5 else 0
    for number in range(connections):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            for turn in range(int(sys.argv[4])):
                time.sleep(pause)
                message = b"%d %d;" % (number, turn)
                connection.sendall(message)
                answer = connection.recv(4096)
                while len(answer) < len(message):
                    answer += connection.recv(4096)
                assert answer == message, (answer, message)
    print("done")
