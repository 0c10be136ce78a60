"""What the package promises, with the memory of messages as numpy sees it."""
import errno
import gc
import os
import select
import signal
import sys
import tempfile
import threading

import numpy
import shunt_channel as channel


def raises(kind, call, *arguments, number=None, **named):
    try:
        call(*arguments, **named)
    except kind as error:
        assert number is None or error.errno == number, error
        return error
    raise AssertionError(f"{kind} expected")


def bytes_and_descriptors():
    sender, receiver = channel.pair()
    read, write = os.pipe()
    sender.send(b"hello", [write, write])
    sender.send(numpy.arange(3, dtype="int64"))
    sender.send_gathered([b"in ", memoryview(b"pieces"), b""])
    sender.send(b"")
    message = receiver.receive(1)
    assert bytes(message) == b"hello" and len(message) == 5 and message.ended is None and not message.may_change
    assert len(message.fds) == 2
    taken = message.take_fd(1)
    os.write(taken, b"!")
    os.close(taken)
    assert os.read(read, 1) == b"!" and len(message.fds) == 1
    raises(IndexError, message.take_fd, 1)
    assert list(numpy.frombuffer(receiver.receive(1), dtype="int64")) == [0, 1, 2]
    assert bytes(receiver.receive(1)) == b"in pieces" and len(receiver.receive(1)) == 0
    os.close(write)
    del message
    assert os.read(read, 1) == b"", "a descriptor was left open"
    os.close(read)
    raises(BlockingIOError, receiver.receive, 0)
    raises(TimeoutError, receiver.receive, 0.01)
    raises(ValueError, receiver.receive, -1)
    raises(OSError, sender.send, b"", [-1], number=errno.EBADF)
    raises(TypeError, sender.send, numpy.zeros((4, 4))[:, 1])
    raises(ValueError, sender.send, numpy.zeros((4, 4), dtype="uint8")[:, 1])
    sender.send(numpy.zeros((0, 4)))
    assert len(receiver.receive(1)) == 0
    raises(TypeError, sender.send, "text")
    assert receiver.credentials(0) == (os.getpid(), os.getuid())
    sender.close()
    raises(ValueError, sender.send, b"")
    assert receiver.receive(1).ended == "closed"
    raises(OSError, receiver.receive, 1, number=errno.ENOTCONN)


def arrays_without_a_copy():
    sender, receiver = channel.pair()
    places = set()
    for number in range(20):
        loan = sender.loan(8 << 20)
        array = numpy.frombuffer(loan, dtype="float32")
        array[:] = number
        # The loan cannot be sent while the array could write it.
        raises(BufferError, sender.commit, loan)
        raises(BufferError, loan.truncate, 1)
        del array
        sender.commit(loan)
        raises(ValueError, sender.commit, loan)
        raises(ValueError, memoryview, loan)
        message = receiver.receive(1)
        assert message.in_place and message.may_change
        array = numpy.frombuffer(message, dtype="float32")
        assert array.base is not None and not array.flags.owndata and not array.flags.writeable
        assert array.shape == (2 << 20,) and array[0] == array[-1] == number
        places.add(array.ctypes.data)
        raises(BufferError, message.release)
        del message
        assert array[5] == number, "an array keeps its message"
        del array
    assert len(places) <= 2, places


def memory_goes_back_with_the_last_array():
    sender, receiver = channel.pair()

    def lend():
        loan = sender.loan(1 << 20, 0)
        loan.truncate(100)
        sender.commit(loan)
        return receiver.receive(1)

    arrays = [numpy.frombuffer(lend(), dtype="uint8") for _ in range(4)]
    raises(BlockingIOError, sender.loan, 1 << 20, 0)
    assert not select.select([sender], [], [], 0)[0]
    arrays.pop()
    gc.collect()
    assert select.select([sender], [], [], 0)[0]
    with lend() as message:
        assert len(message) == 100
    arrays.append(numpy.frombuffer(lend(), dtype="uint8"))
    # A thread that waits lets others run.
    waiting = threading.Thread(target=lambda: sender.loan(1 << 20).give_back())
    waiting.start()
    arrays.clear()
    waiting.join()
    held = [sender.loan(1 << 20) for _ in range(4)]
    raises(OSError, sender.loan, 1 << 20, number=errno.EBUSY)
    del held
    sender.loan(1 << 20, 0).give_back()
    # Arrays outlive both ends.
    array = numpy.frombuffer(lend(), dtype="uint8")
    sender.close()
    receiver.close()
    gc.collect()
    assert array.shape == (100,) and int(array.sum()) >= 0


def paths_and_options():
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "socket")
        raises(FileNotFoundError, channel.Sender, path, 0)
        with channel.Receiver(path, mode=0o640, max_message=1000) as receiver:
            assert os.stat(path).st_mode & 0o777 == 0o640
            raises(OSError, channel.Sender, path, ring_bytes=5000, number=errno.EINVAL)
            with channel.Sender(path, 5, ring_bytes=4096, lent_bytes=0) as sender:
                sender.send(b"x" * 1001)
                assert "1001" in receiver.receive(5).ended
                raises(BrokenPipeError, lambda: [sender.send(b"x") for _ in range(100)])
        assert not os.path.exists(path)


def signals_end_a_wait():
    class Interrupted(Exception):
        pass

    def handler(*_):
        raise Interrupted

    _sender, receiver = channel.pair()
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    raises(Interrupted, receiver.receive)


for test in [
    bytes_and_descriptors,
    arrays_without_a_copy,
    memory_goes_back_with_the_last_array,
    paths_and_options,
    signals_end_a_wait,
]:
    test()
print("as promised", sys.version_info[:2])
