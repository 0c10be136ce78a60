"""Asks a web server for pages by several connections that are kept, and compares each answer.

    pages.py PORT PATH CLIENTS REQUESTS GATE

Every other request posts a body. The page must say back `METHOD QUERY LENGTH DIGEST` of what it was sent, and lines after
that. The requests are repeated until there is a file of the last name. Prints one digest over all answers.
"""

import hashlib
import http.client
import os
import random
import sys

from clients import digest_of

PATIENCE = 10


def ask(port, path, client, count, gate):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    is_over = False
    while not is_over:
        is_over = os.path.exists(gate)
        source = random.Random(client)
        digest = hashlib.md5()
        for turn in range(count):
            body = source.randbytes(source.randrange(1, 3000) if turn % 20 != 7 else 90_000) if turn % 2 else b""
            method, query = ("POST" if body else "GET"), f"{client}.{turn}"
            connection.request(method, f"{path}?{query}", body or None, {"Content-Type": "application/octet-stream"})
            answer = connection.getresponse()
            page = answer.read()
            want = f"{method} {query} {len(body)} {hashlib.md5(body).hexdigest()}\n".encode()
            assert answer.status == 200 and page.startswith(want), f"{query}: {answer.status} {page[:200]}"
            digest.update(page)
    return digest.hexdigest()


def main():
    port, path, clients, count, gate = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    digest_of(clients, lambda client: ask(port, path, client, count, gate))


main()
