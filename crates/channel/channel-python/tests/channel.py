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


def requests_and_responses():
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "socket")
        server = channel.Server(path)
        raises(BlockingIOError, server.receive, 0)
        client = channel.Client(path, 5)

        def serve():
            request = server.receive(5)
            assert bytes(request) == b"ping" and len(request.fds) == 1
            assert server.credentials(request.client) == (os.getpid(), os.getuid())
            taken = request.take_fd()
            assert server.respond(request, bytes(request)[::-1], [taken])
            os.close(taken)

        serving = threading.Thread(target=serve)
        serving.start()
        response = client.call(b"ping", [1], timeout=5)
        assert bytes(response) == b"gnip" and response.client is None and len(response.fds) == 1
        serving.join()
        # Several under way, in another order; arrays of them stay.
        numbers = [client.request(numpy.full(4, number)) for number in range(3)]
        requests = [server.receive(5) for _ in numbers]
        arrays = [numpy.frombuffer(request, dtype="int64") for request in requests]
        for request, array in reversed(list(zip(requests, arrays))):
            assert server.respond(request, array * 2)
        del requests
        for number in reversed(range(3)):
            response = client.response(5)
            assert response.number == numbers[number]
            assert list(numpy.frombuffer(response, dtype="int64")) == [2 * number] * 4
        raises(TimeoutError, client.call, b"nothing", timeout=0.01)
        raises(ValueError, server.respond, response, b"")
        # A client that has gone is counted, and is no error.
        late = server.receive(5)
        client.close()
        while server.respond(late, b"late"):
            pass
        assert server.unanswered == 1
        other = channel.Client(path, 5)
        other.request(b"?")
        request = server.receive(5)
        assert request.client != late.client and server.respond(request, b"!")
        assert bytes(other.response(5)) == b"!"
        server.close()
        raises(BrokenPipeError, other.response, 5)


def publishers_and_subscribers():
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "socket")
        publisher = channel.Publisher(path, history=2, lent_bytes=3 << 20)
        assert publisher.attend(0) == publisher.attend(0.01) == (0, 0, 0)
        for number in range(5):
            assert publisher.publish(b"%d" % number) == number
        one, two = channel.Subscriber(path, 5), channel.Subscriber(path)
        joined = 0
        while joined < 2:
            assert select.select([publisher], [], [], 5)[0]
            joined += publisher.attend(0)[0]
        for subscriber in one, two:
            assert subscriber.credentials == (os.getpid(), os.getuid())
            for number in 3, 4:
                message = subscriber.receive(5)
                assert (bytes(message), message.number, message.missed) == (b"%d" % number, number, 0)
            raises(BlockingIOError, subscriber.receive, 0)
            raises(TimeoutError, subscriber.receive, 0.01)
        loan = publisher.loan(1 << 20)
        array = numpy.frombuffer(loan, dtype="uint8")
        raises(BufferError, publisher.commit, loan)
        array[:] = 7
        del array
        assert publisher.commit(loan) == 5
        messages = [one.receive(5), two.receive(5)]
        arrays = [numpy.frombuffer(message, dtype="uint8") for message in messages]
        assert all(message.in_place and message.may_change and message.intact for message in messages)
        assert all(int(array.sum()) == 7 << 20 and not array.flags.writeable for array in arrays)
        # The publisher takes the memory back from those that keep it.
        loans = [publisher.loan(1 << 20) for _ in range(3)]
        assert not any(message.intact for message in messages)
        assert [status.revoked for status in publisher.subscribers()] == [1, 1]
        del loans, arrays, messages
        # A slow subscriber misses messages, and the other does not.
        for number in range(6, 200):
            publisher.publish(bytes(1500))
            assert one.receive(5).missed == 0
        raises(BlockingIOError, publisher.flush, 0)
        raises(TimeoutError, publisher.flush, 0.01)
        assert [status.behind for status in publisher.subscribers()] == [False, True]
        last = 5
        while last < 199:
            try:
                message = two.receive(0)
                assert message.number == last + 1 + message.missed
                last = message.number
            except BlockingIOError:
                publisher.attend(0)
        publisher.flush(5)
        assert two.missed > 100 and one.missed == 0
        assert publisher.subscribers()[1].missed == two.missed
        one.close()
        assert publisher.attend(5) == (0, 1, 0)
        publisher.publish(b"end")
        publisher.close()
        assert bytes(two.receive(5)) == b"end"
        raises(BrokenPipeError, two.receive, 5)
        raises(ValueError, publisher.publish, b"")


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
    requests_and_responses,
    publishers_and_subscribers,
    signals_end_a_wait,
]:
    test()
print("as promised", sys.version_info[:2])
