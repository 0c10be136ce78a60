"""A WSGI application that says which process answers, and its clients, each with a connection that it keeps.

worker.py PORT CLIENTS REQUESTS
"""

import http.client
import os
import sys
import threading


def app(_environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]


def ask(port, requests, answers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for _ in range(requests):
        connection.request("GET", "/")
        answers.append(connection.getresponse().read())


def main():
    port, clients, requests = map(int, sys.argv[1:])
    answers = []
    threads = [threading.Thread(target=ask, args=(port, requests, answers)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(answers), "answers of", len(set(answers)), "process")


if __name__ == "__main__":
    main()
