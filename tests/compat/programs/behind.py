"""Goes behind another root directory and then forks; the child echoes what one connection sends.
behind.py PORT ROOT"""
import os
import socket
import sys

listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
os.chroot(sys.argv[2])
child = os.fork()
if child:
    print("child", child, flush=True)
    os.waitpid(child, 0)
else:
    connection = listener.accept()[0]
    while data := connection.recv(100):
        connection.sendall(data)
    os._exit(0)
