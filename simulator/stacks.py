"""Writes what py-spy sees beside the job: the stacks of the training thread, of loader workers and the pinning thread.

A burst of some seconds from the end of the first step on, as dlprof's sampler begins with one; what the recorder does
itself is left out, as a reader leaves it out.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from simulator.job import Job
from simulator.places import Place
from simulator.script import FOLDER, LIBRARIES, frames
from simulator.simulation import Simulated

RATE = 47  # samples a second
BURST_NS = 3_000_000_000

_DATA = f"{LIBRARIES}/torch/utils/data"
_WORKER = f"_worker_loop ({_DATA}/_utils/worker.py:353)"
_FETCHES = (f"_MapDatasetFetcher.fetch ({_DATA}/_utils/fetch.py:54)", f"Texts.__getitem__ ({FOLDER}data.py:21)")
_IDLE = ("Queue.get (/usr/lib/python3.12/multiprocessing/queues.py:113)",)
_PINS = f"_pin_memory_loop ({_DATA}/_utils/pin_memory.py:52)"
_PINNING = (f"pin_memory ({_DATA}/_utils/pin_memory.py:100)", f"pin_memory ({_DATA}/_utils/pin_memory.py:57)")


def text(rank: Simulated, job: Job, place: Place) -> str:
    """Return one burst in py-spy's raw format, with the sampler's line before it."""
    rows = rank.records.rows
    begin, end = rows[0].end, min(rows[0].end + BURST_NS, rows[-1].end)
    rng = np.random.default_rng((job.seed, rank.rank, 1 << 28))
    ticks = np.arange(begin, end, 1e9 / RATE)
    ticks = (ticks + rng.uniform(0, 0.5e9 / RATE, len(ticks))).astype(np.int64)
    seen = Counter(_seen(rank, job, place.pid, [int(at) for at in ticks if at < end]))
    head = {"start_ns": place.clock.at(begin), "end_ns": place.clock.at(end), "rate": RATE}
    return f"#{json.dumps(head)}\n" + "".join(f"{stack} {n}\n" for stack, n in seen.items())


def _seen(rank: Simulated, job: Job, pid: int, ticks: Sequence[int]) -> Iterator[str]:
    lines, doing = rank.records.lines, rank.records.doing
    line_times, times = [at for at, _ in lines], [at for at, _ in doing]
    known = {name: frames(job, name) for name in {name for _, name in lines}}
    process = f'process {pid}:"python train.py"'
    for at in ticks:
        if doing[bisect_right(times, at) - 1][1] != "profiler":
            stack = known[lines[bisect_right(line_times, at) - 1][1]]
            yield ";".join((process, f"thread ({pid}): MainThread", *stack))
    if rank.queue is None:
        return
    for worker in sorted({f.pid for f in rank.queue.fetched if f.worker >= 0}):
        busy = [(f.start, f.end) for f in rank.queue.fetched if f.pid == worker]
        its = (process, f'process {worker}:"python train.py"', f"thread ({worker}): MainThread", _WORKER)
        yield from _of_thread(its, busy, _FETCHES, ticks)
    if rank.queue.pinned:
        own = (process, f"thread ({pid + 50}): Thread-1 (_pin_memory_loop)", _PINS)
        yield from _of_thread(own, rank.queue.pinned, _PINNING, ticks)


def _of_thread(
    own: Sequence[str], busy: Sequence[tuple[int, int]], works: Sequence[str], ticks: Sequence[int]
) -> Iterator[str]:
    """Return the stacks of a thread that works in such intervals, in order, and else waits for a queue."""
    begins = [begin for begin, _ in busy]
    for at in ticks:
        place = bisect_right(begins, at) - 1
        working = place >= 0 and at < busy[place][1]
        yield ";".join((*own, *(works if working else _IDLE)))
