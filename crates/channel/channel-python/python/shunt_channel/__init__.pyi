"""Messages with descriptors between processes of one host, without a copy.

A timeout is None (without limit) or seconds. Errors are OSError: BlockingIOError (timeout 0) and
TimeoutError if there was nothing or no room in time, BrokenPipeError if the other end has gone. Only
one thread may use a Sender or a Receiver at a time; waiting does not hold the interpreter's lock.
"""

import os
from collections.abc import Buffer, Sequence
from types import TracebackType

MAX_MESSAGE: int
MAX_DESCRIPTORS: int

class Sender:
    """The sending end. Each buffer is sent as a copy; a loan is not copied."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        timeout: float | None = None,
        *,
        ring_bytes: int | None = None,
        lent_bytes: int | None = None,
    ) -> None: ...
    def send(self, data: Buffer, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Sends a copy of any contiguous buffer, with copies of the descriptors. Signals do not end the wait."""

    def send_gathered(self, pieces: Sequence[Buffer], fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Sends copies of several buffers as one message."""

    def loan(self, len: int, timeout: float | None = None) -> Loan:
        """Returns memory for a message. Waits while the receiver has all memory for this length."""

    def commit(self, loan: Loan, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Sends a loan. Arrays and memoryviews of it must be gone: BufferError."""

    def fileno(self) -> int:
        """Returns a descriptor for poll: readable when a call that raised BlockingIOError should be tried again."""

    def close(self) -> None: ...
    def __enter__(self) -> Sender: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Receiver:
    """The receiving end of any number of senders. Its socket's file is removed with it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_senders: int | None = None,
        max_message: int | None = None,
        mode: int | None = None,
    ) -> None: ...
    def receive(self, timeout: float | None = None) -> Message:
        """Returns the next message, in place if it was lent, or the end of a sender (Message.ended)."""

    def credentials(self, sender: int) -> tuple[int, int] | None:
        """Returns the process id and the user id of a sender, or None if it has ended."""

    def fileno(self) -> int:
        """Returns a descriptor for poll: readable when a receive that raised BlockingIOError should be tried again."""

    def close(self) -> None: ...
    def __enter__(self) -> Receiver: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Loan:
    """A writable buffer for one message, with bytes of an earlier one. The receiver can read it before it is sent."""

    def truncate(self, len: int) -> None:
        """Shortens the message."""

    def give_back(self) -> None:
        """Gives the memory back, and sends nothing; as when the loan is deleted."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int) -> memoryview: ...

class Message:
    """A received message: a read-only buffer. The sender is able to change it if may_change is True: then bytes(message)
    is a copy that is safe to check and use. The memory goes back to the sender when the message and all arrays and
    memoryviews of it are gone, or by release."""

    @property
    def sender(self) -> int:
        """The number of the sender, which is never used again for another one."""

    @property
    def ended(self) -> str | None:
        """None for a message; otherwise why the sender has ended."""

    @property
    def in_place(self) -> bool:
        """Whether nothing was copied."""

    @property
    def may_change(self) -> bool:
        """Whether the sender is able to change the bytes."""

    @property
    def intact(self) -> bool:
        """Whether all that was read until now is of this message: False once a publisher has taken its memory back."""

    @property
    def number(self) -> int | None:
        """The number of a publisher's message, from 0 on."""

    @property
    def missed(self) -> int:
        """How many messages of a publisher were missed between the last one that was received and this one."""

    @property
    def fds(self) -> list[int]:
        """The descriptors that were not taken. They are closed with the message."""

    def take_fd(self, index: int = 0) -> int:
        """Takes a descriptor of fds, which the caller closes."""

    def release(self) -> None:
        """Gives the memory back. Arrays and memoryviews of it must be gone: BufferError."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int) -> memoryview: ...
    def __enter__(self) -> Message: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Numbered:
    """A request that a server has received, or a response that a client has: a read-only buffer."""

    @property
    def number(self) -> int:
        """The number of the request."""

    @property
    def client(self) -> int | None:
        """The client of a request, whose number is never used again for another one."""

    @property
    def fds(self) -> list[int]:
        """The descriptors that were not taken. They are closed with the message."""

    def take_fd(self, index: int = 0) -> int:
        """Takes a descriptor of fds, which the caller closes."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int) -> memoryview: ...

class Server:
    """The end that responds to requests, in any order, for any number of clients."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_clients: int | None = None,
        max_message: int | None = None,
        mode: int | None = None,
        ring_bytes: int | None = None,
    ) -> None: ...
    def receive(self, timeout: float | None = None) -> Numbered:
        """Returns the next request. Requests of one client come in its order."""

    def respond(
        self, request: Numbered, data: Buffer, fds: Sequence[int] = (), timeout: float | None = 0.0
    ) -> bool:
        """Sends the response to a request. Returns False if the client has gone, which is counted. BlockingIOError:
        the client does not read its responses."""

    @property
    def unanswered(self) -> int:
        """How many responses were not sent, because their client had gone."""

    def credentials(self, client: int) -> tuple[int, int] | None:
        """Returns the process id and the user id of a client, or None if it has ended."""

    def fileno(self) -> int:
        """Returns a descriptor for poll: readable when a receive that raised BlockingIOError should be tried again."""

    def close(self) -> None: ...
    def __enter__(self) -> Server: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Client:
    """The end that sends requests. BrokenPipeError: the server has gone."""

    def __init__(
        self, path: str | os.PathLike[str], timeout: float | None = None, *, ring_bytes: int | None = None
    ) -> None: ...
    def call(self, data: Buffer, fds: Sequence[int] = (), timeout: float | None = None) -> Numbered:
        """Sends a request and returns its response. Responses to earlier requests are discarded."""

    def request(self, data: Buffer, fds: Sequence[int] = (), timeout: float | None = None) -> int:
        """Sends a request, and returns its number. Several requests may wait for their responses."""

    def response(self, timeout: float | None = None) -> Numbered:
        """Returns the next response."""

    def fileno(self) -> int:
        """Returns a descriptor for poll: readable when a response that raised BlockingIOError should be tried again."""

    def close(self) -> None: ...
    def __enter__(self) -> Client: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class SubscriberStatus:
    """A subscriber, as its publisher sees it."""

    @property
    def id(self) -> int: ...
    @property
    def behind(self) -> bool:
        """Whether there are messages that it was not sent yet."""

    @property
    def missed(self) -> int:
        """How many messages it was not sent, because they had left the history."""

    @property
    def revoked(self) -> int:
        """How many messages it was sent, and did not give back before their memory was needed."""

    @property
    def credentials(self) -> tuple[int, int] | None:
        """The process id and the user id."""

class Publisher:
    """The end that sends each message to all of its subscribers, and waits for none. It keeps the last `history`
    messages for those that come later or are slow."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        history: int = 0,
        max_subscribers: int | None = None,
        ring_bytes: int | None = None,
        lent_bytes: int | None = None,
        mode: int | None = None,
    ) -> None: ...
    def publish(self, data: Buffer) -> int:
        """Publishes a copy of any contiguous buffer, and returns the number of the message, from 0 on."""

    def loan(self, len: int) -> Loan:
        """Returns memory for a message, which commit publishes without a copy."""

    def commit(self, loan: Loan) -> int:
        """Publishes a loan. Arrays and memoryviews of it must be gone: BufferError."""

    def attend(self, timeout: float | None = None) -> tuple[int, int, int]:
        """Attends to the subscribers until there is one more or less, or until the time is over. Returns how many have
        joined, have left, and were refused because they broke the protocol."""

    def flush(self, timeout: float | None = None) -> None:
        """Attends until every subscriber was sent all messages."""

    def subscribers(self) -> list[SubscriberStatus]: ...
    def fileno(self) -> int:
        """Returns a descriptor for poll: readable when attend has something to do."""

    def close(self) -> None: ...
    def __enter__(self) -> Publisher: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Subscriber:
    """The end that receives from a publisher. BrokenPipeError: the publisher has gone."""

    def __init__(
        self, path: str | os.PathLike[str], timeout: float | None = None, *, max_message: int | None = None
    ) -> None: ...
    def receive(self, timeout: float | None = None) -> Message:
        """Returns the next message, in place if it has more than 2 KiB: then see Message.intact."""

    @property
    def missed(self) -> int:
        """How many messages were missed so far, without those before the first that was received."""

    @property
    def credentials(self) -> tuple[int, int] | None:
        """The process id and the user id of the publisher."""

    def fileno(self) -> int:
        """Returns a descriptor for poll: readable when a receive that raised BlockingIOError should be tried again."""

    def close(self) -> None: ...
    def __enter__(self) -> Subscriber: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
