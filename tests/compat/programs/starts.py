"""Starts a program in each way that there is, and says what it sees of it: its end, that no other child's comes, and how many signals
told of one.

    starts.py PROGRAM FILE...

The program is run once for each file, as PROGRAM FILE, by the next way."""

import os
import signal
import subprocess
import sys
import threading

program, files = sys.argv[1], sys.argv[2:]
told = []
# Python would wait for a child by itself when its object is collected, so keep the objects.
kept = []
signal.signal(signal.SIGCHLD, lambda *_: told.append(1))
# Python ignores SIGPIPE. With the default action, a broken pipe of the shim would end this program.
signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def spawned(file):
    return os.posix_spawn(program, [program, file], os.environ)


def searched(file):
    name = os.path.basename(program)
    os.environ["PATH"] = "/nowhere:" + os.path.dirname(program) + ":" + os.environ["PATH"]
    child = os.posix_spawnp(name, [name, file], os.environ)
    os.environ["PATH"] = os.environ["PATH"].split(":", 2)[2]
    return child


def by_vfork(file):
    kept.append(subprocess.Popen([program, file]))
    return kept[-1].pid


def by_vfork_with_descriptors(file):
    kept.append(subprocess.Popen([program, file], close_fds=False, start_new_session=True))
    return kept[-1].pid


def forked(become):
    child = os.fork()
    if child == 0:
        try:
            become()
        finally:
            os._exit(99)
    return child


def by_exec(file):
    return forked(lambda: os.execv(program, [program, file]))


def by_descriptor(file):
    descriptor = os.open(program, os.O_RDONLY)
    child = forked(lambda: os.execve(descriptor, [program, file], os.environ))
    os.close(descriptor)
    return child


def by_another_thread(file):
    """The thread that executes the program is not the first of its process."""

    def become():
        thread = threading.Thread(target=os.execv, args=(program, [program, file]))
        thread.start()
        thread.join()

    return forked(become)


def by_script(file):
    script = file + ".script"
    with open(script, "w") as text:
        text.write("#!" + program + " " + file + "\n")
    os.chmod(script, 0o755)
    return os.posix_spawn(script, [script], os.environ)


WAYS = [spawned, searched, by_vfork, by_vfork_with_descriptors, by_exec, by_descriptor, by_another_thread, by_script]

for way, file in zip(WAYS, files, strict=True):
    del told[:]
    print(way.__name__, flush=True)
    child = way(file)
    ended, status = os.waitpid(-1, 0)
    print("the one that was started" if ended == child else "another", os.waitstatus_to_exitcode(status))
    try:
        print("and", os.waitpid(-1, os.WNOHANG))
    except ChildProcessError:
        print("and no other; signals:", len(told))

# A file that cannot be executed is refused, and nothing is left of the attempt.
for refuse in (os.devnull, os.path.dirname(program), program + ".missing"):
    try:
        os.posix_spawn(refuse, [refuse], os.environ)
        print("it was started")
    except OSError as error:
        print("posix_spawn:", error.strerror)
try:
    os.posix_spawn(program, [program, "x" * (1 << 20)], os.environ)
    print("it was started")
except OSError as error:
    print("posix_spawn of much:", error.strerror)
try:
    os.execv(program, [program, "x" * (1 << 20)])
except OSError as error:
    print("execv of much:", error.strerror)
try:
    print("and", os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("and no child")
