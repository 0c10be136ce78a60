"""Receives published arrays, and computes with each where its publisher has written it."""
import sys

import numpy
import shunt_channel

with shunt_channel.Subscriber(sys.argv[1], timeout=30) as subscriber:
    total, places = 0.0, set()
    while True:
        try:
            message = subscriber.receive(timeout=30)
        except BrokenPipeError:
            break
        assert message.in_place
        rows = numpy.frombuffer(message, dtype="float64").reshape(-1, 1024)
        mean, place = rows.mean(), rows.ctypes.data
        # A publisher takes memory back from a subscriber that keeps it for too long.
        if message.intact:
            total += mean
            places.add(place)
        del rows, message
    print(f"{total:.1f}, from {len(places)} places in memory, {subscriber.missed} missed")
