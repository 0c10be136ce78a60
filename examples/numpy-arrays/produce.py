"""Makes arrays of 8 MiB in memory that the receiver reads, and sends them."""
import sys

import numpy
import shunt_channel

ROWS, COLUMNS = 1024, 1024

with shunt_channel.Sender(sys.argv[1], timeout=30) as sender:
    for number in range(int(sys.argv[2])):
        loan = sender.loan(ROWS * COLUMNS * 8, timeout=30)
        rows = numpy.frombuffer(loan, dtype="float64").reshape(ROWS, COLUMNS)
        # Any computation with `out=` writes its result there.
        numpy.multiply(numpy.ones(COLUMNS), number, out=rows)
        # A loan is sent once no array can write to it any more.
        del rows
        sender.commit(loan)
