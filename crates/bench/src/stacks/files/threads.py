

# Threads call `ask` with their index and the end time. `ask` appends the time of each operation to
# `times`.
import json
import sys
import threading

threads, seconds = int(sys.argv[1]), float(sys.argv[2])
begin = time.perf_counter()
running = [threading.Thread(target=ask, args=(thread, begin + seconds)) for thread in range(threads)]
for thread in running:
    thread.start()
for thread in running:
    thread.join()
took = time.perf_counter() - begin
times.sort()
percentile = lambda part: times[int(part * (len(times) - 1))] * 1e6
print(json.dumps({"operations": len(times), "seconds": took, "p50_us": percentile(0.5), "p99_us": percentile(0.99)}))
