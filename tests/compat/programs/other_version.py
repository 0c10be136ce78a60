"""A broker of another version: it says so and hangs up on everybody. Prints how often somebody has come.

    other_version.py SOCKET VERSION SECONDS
"""

import os
import select
import socket
import struct
import sys
import time

MAGIC = 0x544E4853


def main(path, version, seconds):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)
    print("listening", flush=True)
    end = time.monotonic() + seconds
    came = 0
    while (left := end - time.monotonic()) > 0:
        if select.select([listener], [], [], left)[0]:
            client, _ = listener.accept()
            client.settimeout(2)
            try:
                client.recv(256)
                client.send(struct.pack("<IHHQ", MAGIC, version, 1, 0))
            except OSError:
                pass
            client.close()
            came += 1
    os.unlink(path)
    print("came", came, flush=True)


main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
