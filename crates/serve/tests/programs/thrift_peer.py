"""Apache Thrift's own library for Python: writes messages, and reads answers, as hexadecimal digits.

    thrift_peer.py write    prints FORM KIND KEY DIGITS for messages of every form
    thrift_peer.py read     reads FORM DIGITS, and prints TYPE SEQUENCE CODE TEXT of each TApplicationException
"""

import sys

from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.Thrift import TApplicationException, TMessageType, TType
from thrift.transport.TTransport import TFramedTransport, TMemoryBuffer

FORMS = ["strict", "old", "framed-strict", "framed-old"]


def protocol(form, memory):
    transport = TFramedTransport(memory) if form.startswith("framed") else memory
    strict = form.endswith("strict")
    return TBinaryProtocol(transport, strictRead=strict, strictWrite=strict)


def field(out, kind, number, write, value):
    out.writeFieldBegin("", kind, number)
    write(value)
    out.writeFieldEnd()


def everything(out):
    """A field of each type, nested, in front of the key."""
    field(out, TType.BOOL, 2, out.writeBool, True)
    field(out, TType.BYTE, 3, out.writeByte, -7)
    field(out, TType.DOUBLE, 4, out.writeDouble, 2.5)
    field(out, TType.I16, 5, out.writeI16, -300)
    field(out, TType.I64, 6, out.writeI64, -(1 << 60))
    out.writeFieldBegin("", TType.MAP, 7)
    out.writeMapBegin(TType.STRING, TType.LIST, 2)
    for name in ["one", "two"]:
        out.writeString(name)
        out.writeListBegin(TType.STRUCT, 3)
        for number in range(3):
            out.writeStructBegin("")
            field(out, TType.I32, 1, out.writeI32, number)
            out.writeFieldBegin("", TType.SET, 2)
            out.writeSetBegin(TType.BOOL, 2)
            out.writeBool(True)
            out.writeBool(False)
            out.writeSetEnd()
            out.writeFieldEnd()
            out.writeFieldStop()
            out.writeStructEnd()
        out.writeListEnd()
    out.writeMapEnd()
    out.writeFieldEnd()


def write():
    for form in FORMS:
        for kind in [TMessageType.CALL, TMessageType.ONEWAY]:
            for key in ["-5", "1000000", "user:42", "", "none"]:
                memory = TMemoryBuffer()
                out = protocol(form, memory)
                out.writeMessageBegin("forward_something", kind, 77)
                everything(out)
                if key.lstrip("-").isdigit():
                    field(out, TType.I32, 1, out.writeI32, int(key))
                elif key != "none":
                    field(out, TType.STRING, 1, out.writeString, key)
                field(out, TType.STRING, 8, out.writeString, "payload" * 10)
                out.writeFieldStop()
                out.writeMessageEnd()
                out.trans.flush()
                print(form, kind, key or "empty", memory.getvalue().hex())


def read():
    for line in sys.stdin:
        form, digits = line.split()
        answer = protocol(form, TMemoryBuffer(bytes.fromhex(digits)))
        name, kind, sequence = answer.readMessageBegin()
        # With an old header the library returns bytes instead of a string.
        assert name in ("forward_something", b"forward_something"), name
        exception = TApplicationException()
        exception.read(answer)
        answer.readMessageEnd()
        print(kind, sequence, exception.type, exception.message)


{"write": write, "read": read}[sys.argv[1]]()
