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
