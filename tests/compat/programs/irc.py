"""So many people in one channel of an IRC server: each hears all that the others say.
irc.py PORT PEOPLE LINES"""
import socket
import sys
import threading
import time

port, people, lines = map(int, sys.argv[1:])
all_here = threading.Barrier(people)
heard = [0] * people


def talk(number):
    server = socket.create_connection(("127.0.0.1", port))
    server.settimeout(30)
    answers = server.makefile("rb")

    def say(line):
        server.sendall(line.encode() + b"\r\n")

    def hear(text):
        for line in answers:
            line = line.decode()
            if line.startswith("PING"):
                say("PONG" + line[4:].strip())
            if text in line:
                return line.strip()
        sys.exit(f"{number}: the server has left before {text}")

    say(f"NICK guest{number}")
    say(f"USER guest{number} 0 * :guest")
    hear(" 376 ")
    say("JOIN #all")
    hear(" 366 ")
    all_here.wait()
    for line in range(lines):
        say(f"PRIVMSG #all :{number} says {line}")
        time.sleep(0.002)
    for _ in range(lines * (people - 1)):
        hear("PRIVMSG #all")
        heard[number] += 1
    all_here.wait()
    say("QUIT :bye")
    hear("ERROR")


threads = [threading.Thread(target=talk, args=(number,)) for number in range(people)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(heard)
