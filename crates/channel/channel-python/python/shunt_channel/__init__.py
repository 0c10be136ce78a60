"""Messages with descriptors between processes of one host, without a copy.

A Loan and a Message are buffers: numpy.frombuffer(message) is an array of the message itself.
"""

from ._shunt_channel import (
    MAX_DESCRIPTORS,
    MAX_MESSAGE,
    Client,
    Loan,
    Message,
    Numbered,
    Publisher,
    Receiver,
    Sender,
    Server,
    Subscriber,
    SubscriberStatus,
    pair,
)

__all__ = [
    "MAX_DESCRIPTORS",
    "MAX_MESSAGE",
    "Client",
    "Loan",
    "Message",
    "Numbered",
    "Publisher",
    "Receiver",
    "Sender",
    "Server",
    "Subscriber",
    "SubscriberStatus",
    "pair",
]
