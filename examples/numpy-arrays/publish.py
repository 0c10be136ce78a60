"""Makes arrays of 8 MiB in memory that all subscribers read, and publishes them."""
import sys

import numpy
import shunt_channel

ROWS, COLUMNS = 1024, 1024
path, subscribers, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

# A subscriber that is slower than two arrays misses some, and does not keep the others waiting. Here
# `flush` waits for it.
with shunt_channel.Publisher(path, history=2) as publisher:
    print("ready", flush=True)
    while len(publisher.subscribers()) < subscribers:
        publisher.attend(timeout=30)
    for number in range(count):
        loan = publisher.loan(ROWS * COLUMNS * 8)
        rows = numpy.frombuffer(loan, dtype="float64").reshape(ROWS, COLUMNS)
        numpy.multiply(numpy.ones(COLUMNS), number, out=rows)
        # A loan is published once no array can write to it any more.
        del rows
        publisher.commit(loan)
        publisher.flush(timeout=30)
