"""The job of nsys_2022.sqlite.gz and nsys_2023.sqlite.gz: `nsys profile --trace=nvtx,osrt python record_nsys.py`.

Recorded with nsys 2022.4.2 and 2023.4.4 and the package nvtx 0.2.10, exported with `nsys export --type sqlite`. Removed
afterwards: what describes the machine and its other processes, all but the last 60 calls of the operating system, and
tables of numbers that no event of these refers to.
"""

import math
import threading
import time

import nvtx  # type: ignore[import-untyped,unused-ignore]


def work(count: int) -> float:
    """Compute for a while."""
    return sum(math.sqrt(i) for i in range(count))


def beside() -> None:
    """Sleep on a thread of its own."""
    for _ in range(4):
        time.sleep(0.002)


thread = threading.Thread(target=beside)
thread.start()
epoch = nvtx.start_range("epoch 0")
for step in range(8):
    with nvtx.annotate(f"dlprof::step {step}"):
        with nvtx.annotate("dlprof::fetch"):
            time.sleep(0.003)
        with nvtx.annotate("forward"):
            work(20_000)
        with nvtx.annotate("backward", domain="other", category="c"):
            work(40_000)
        with nvtx.annotate("optimizer", payload=3):
            work(4_000)
nvtx.mark("done")
nvtx.end_range(epoch)
thread.join()
