"""Clients of the server's container, which run until a file `stop` exists. Each checks all that it
gets, and counts what it has done. A kept client uses one connection all the time; others make one
for each round. A line of JSON reports all of them, again and again:

done      how often each client has done its work since the last change of the file `phase`
longest   the longest round of each client since then, in milliseconds
failed    all errors
"""

import errno
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time

directory, go_client, psql = sys.argv[1:4]
wanted = sys.argv[4].split(",")
java = sys.argv[5:]
SERVER = "10.50.2.2"
LIMIT = 60
PAGE = b"x" * 3000


def connect(port, blocks=True):
    s = socket.socket()
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A close makes the port free immediately.
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if blocks:
        s.connect((SERVER, port))
    else:
        s.setblocking(False)
        error = s.connect_ex((SERVER, port))
        assert error == errno.EINPROGRESS, os.strerror(error)
        poller = select.poll()
        poller.register(s, select.POLLOUT)
        assert poller.poll(LIMIT * 1000), "it is never writable"
        error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        assert error == 0, os.strerror(error)
    s.settimeout(LIMIT)
    return s


def receive(s, until):
    came = b""
    while not until(came):
        more = s.recv(65536)
        assert more, f"the connection ends after {came[:200]}"
        came += more
    return came


def page(s, kept):
    word = b"keep-alive" if kept else b"close"
    s.sendall(b"GET /page HTTP/1.1\r\nHost: x\r\nConnection: %s\r\n\r\n" % word)
    came = receive(s, lambda came: PAGE in came)
    assert came.startswith(b"HTTP/1.1 200 ") and came.endswith(PAGE), came[:200]


def nginx(blocks):
    def one(_):
        with connect(80, blocks) as s:
            page(s, False)

    return one


def nginx_kept():
    s = connect(80)
    return lambda _: page(s, True)


def command(s, answer, *words):
    s.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
    came = receive(s, lambda came: len(came) >= len(answer))
    assert came == answer, (came[:200], answer[:200])


def redis_round(s, key, number):
    value = b"%d-" % number * (number % 700 + 1)
    command(s, b"+OK\r\n", b"SET", key, value)
    command(s, b"$%d\r\n%s\r\n" % (len(value), value), b"GET", key)


def redis(number):
    with connect(6379) as s:
        redis_round(s, b"short", number)


def redis_kept():
    s = connect(6379)

    def one(number):
        redis_round(s, b"kept", number)
        command(s, b":%d\r\n" % (number + 1), b"INCR", b"count")

    return one


def echo(s, number):
    sent = b"%08d" % number * (number % 5000 + 1)
    s.sendall(b"n%d %d\n" % (number, len(sent)) + sent)
    local, remote = (":".join(map(str, name)) for name in (s.getsockname(), s.getpeername()))
    head = f"n{number} {remote} {local}\n".encode()
    came = receive(s, lambda came: len(came) >= len(head) + len(sent))
    assert came == head + sent, came[:200]


def go_kept():
    s = connect(9000)
    return lambda number: echo(s, number)


def go(number):
    with connect(9000, number % 2 == 0) as s:
        echo(s, number)


def static(_):
    """A static client, with connections that are used again after a while."""
    ran = subprocess.run([go_client, f"{SERVER}:9000", "10", "4", "20000", "100"], capture_output=True, text=True)
    assert ran.stdout.endswith("ok 10\n"), ran


def psql_of(*words):
    command = ["stdbuf", "-oL", psql, "-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-h", SERVER, "-U", "postgres", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rows(client, name, number):
    """Adds a row, and checks the number and the sum of all that this client has added."""
    client.stdin.write(f"insert into log values ('{name}', {number});\n")
    client.stdin.write(f"select count(*), sum(n), 'end' from log where client = '{name}';\n")
    client.stdin.flush()
    line = client.stdout.readline()
    assert line == f"{number + 1}|{number * (number + 1) // 2}|end\n", (line, client.poll())


def postgres_kept():
    client = psql_of()
    return lambda number: rows(client, "kept", number)


def postgres(number):
    client = psql_of()
    rows(client, "short", number)
    client.stdin.close()
    assert client.wait() == 0 and client.stdout.read() == ""


def wrk(_):
    script = os.path.join(directory, "wrk.lua")
    words = ["wrk", "-t1", "-c3", "-d1s", "--timeout", f"{LIMIT}s", "-s", script, f"http://{SERVER}/page"]
    ran = subprocess.run(words, capture_output=True, text=True)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0 and "Socket errors" not in said and "Non-2xx" not in said and "wrong" not in said, said


def kafka_kept():
    """Each record is written, and read by another client. One partition keeps their order."""
    at = ["--bootstrap-server", f"{SERVER}:9092", "--topic", "log"]
    reads = ["org.apache.kafka.tools.consumer.ConsoleConsumer", *at, "--from-beginning"]
    writes = ["org.apache.kafka.tools.ConsoleProducer", *at, "--reader-property", "parse.key=true"]
    log = open(os.path.join(directory, "kafka-clients.out"), "w")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
    producer = subprocess.Popen(["java", *java, *writes], **pipes)
    consumer = subprocess.Popen(["java", *java, *reads], **pipes)

    def one(number):
        record = f"{number}-" * (number % 2000 + 1)
        producer.stdin.write(f"key\t{record}\n")
        producer.stdin.flush()
        line = consumer.stdout.readline()
        assert line == record + "\n", (line[:200], producer.poll(), consumer.poll())

    return one


# Each makes the function of one round, and says how long to pause after it.
KINDS = {
    "nginx": (lambda: nginx(True), 0.01),
    "nginx without blocking": (lambda: nginx(False), 0.01),
    "nginx kept": (nginx_kept, 0.02),
    "wrk": (lambda: wrk, 0),
    "redis": (lambda: redis, 0.01),
    "redis kept": (redis_kept, 0.02),
    "go": (lambda: go, 0.01),
    "go kept": (go_kept, 0.02),
    "static": (lambda: static, 0.05),
    "postgres": (lambda: postgres, 0.05),
    "postgres kept": (postgres_kept, 0.02),
    "kafka kept": (kafka_kept, 0.02),
}

lock = threading.Lock()
failed, done, longest = [], {}, {}
stop = os.path.join(directory, "stop")


def run(name):
    number = 0
    try:
        make, pause = KINDS[name]
        one = make()
        while not os.path.exists(stop):
            began = time.monotonic()
            one(number)
            took = int((time.monotonic() - began) * 1000)
            number += 1
            with lock:
                done[name] += 1
                longest[name] = max(longest[name], took)
            time.sleep(pause)
    except Exception as error:
        with lock:
            failed.append([name, number, time.time(), repr(error)])


def begin():
    """Counts from 0."""
    for name in wanted:
        done[name] = longest[name] = 0


begin()
threads = [threading.Thread(target=run, args=(name,)) for name in wanted]
for thread in threads:
    thread.start()
phase = ""
while True:
    is_over = not any(thread.is_alive() for thread in threads)
    try:
        with open(os.path.join(directory, "phase")) as file:
            now = file.read()
    except FileNotFoundError:
        now = ""
    with lock:
        if now != phase:
            phase = now
            begin()
        said = {"phase": phase, "over": is_over, "done": done, "longest": longest, "failed": failed}
        said = json.dumps(said)
    print(said, flush=True)
    if is_over:
        # Clients that are programs end with it.
        os._exit(0)
    time.sleep(0.05)
