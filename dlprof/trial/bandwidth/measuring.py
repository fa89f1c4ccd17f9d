"""Times collectives of each size on all ranks, as nccl-tests does: rank 0 decides what comes next, and all obey.

A sample is one call, or the mean of several where one is short. On a GPU it lies between two events on the stream, and
samples follow each other without a synchronisation. On a CPU it is on the wall's clock, and begins with a barrier. Of
each sample the longest of all ranks counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from dlprof.trial.bandwidth import exchanges
from dlprof.trial.bandwidth.exchanges import Exchange
from dlprof.trial.bandwidth.joining import BrokenError, Ranks, first_line
from dlprof.trial.bandwidth.plan import Plan
from dlprof.trial.bandwidth.results import OUT_OF_TIME, PairRow, Row
from dlprof.units import size as bytes_text

Tell = Callable[[str], None]

# A sample is at least so long: a clock, or an event, is exact to a microsecond or two.
SAMPLE_S = 0.001
MOST_CALLS = 100
LEAST_SAMPLES = 3

# Pairs are measured at one size, at which starting no longer counts.
PAIR_BYTES = 16 << 20
MOST_IN_PAIRS = 16  # ranks, or hosts: 120 pairs, one after the other
_FOR_PAIRS = 0.2  # of the time, where there are pairs


class Measurement:
    """The measurement on this rank."""

    def __init__(self, plan: Plan, here: Ranks, device: torch.device, tell: Tell) -> None:
        self._plan, self._here, self._device, self._tell = plan, here, device, tell
        self._dtype: torch.dtype = getattr(torch, plan.dtype)
        self._begun = time.monotonic()
        self._call_s: dict[str, float] = {}  # of each collective, one call of the size before
        self._impossible: set[str] = set()  # collectives that the backend does not have

    def rows(self, until_s: float) -> Iterator[Row]:
        """Measure all sizes, the smallest first, until the time is up; yield rows on rank 0 only."""
        plan = self._plan
        for n, size in enumerate(plan.sizes):
            for collective in (c for c in plan.collectives if c not in self._impossible):
                row = self._row(collective, size, n, until_s)
                if row is not None:
                    yield row
            if self._here.rank == 0:
                self._tell(f"up to {bytes_text(size)}: {self._passed_s():.0f} s of at most {plan.seconds:g} s")

    def pairs(self, hosts: list[str]) -> Iterator[PairRow]:
        """Measure each pair of ranks, or of hosts by their first rank, one after the other; yield on rank 0 only."""
        here, bytes_ = self._here, min(self._plan.sizes[-1], PAIR_BYTES)
        members = pair_members(hosts)
        count = max(bytes_ // self._dtype.itemsize, 1)
        for a, b in ((a, b) for a in members for b in members if a < b):
            key = f"pair/{a}/{b}"
            if not here.announce(f"{key}/go", self._passed_s() < self._plan.seconds):
                return
            samples: list[float] | None = None
            if here.rank in (a, b):
                other = b if here.rank == a else a
                with self._exchanging(f"sending between ranks {a} and {b}"):
                    exchange = exchanges.between(other, other, count, self._dtype, self._device, here.rank)
                    self._warm_up(exchange)
                    samples = self._samples(exchange, self._plan.iterations, 1, barrier=False)
            told = here.collect(key, samples)
            if told is not None:
                yield PairRow((a, b), count * self._dtype.itemsize, tuple(tuple(told[r]) for r in (a, b)))

    def _passed_s(self) -> float:
        return time.monotonic() - self._begun

    def _row(self, collective: str, size: int, n: int, until_s: float) -> Row | None:
        """Measure one collective of one size: a row on rank 0, None elsewhere."""
        here = self._here
        key = f"{collective}/{n}"
        if not here.announce(f"{key}/go", self._fits(collective, n, until_s)):
            return Row(collective, size, why=OUT_OF_TIME) if here.rank == 0 else None
        what = f"{collective} of {bytes_text(size)}"
        exchange, error = self._prepared(collective, size)
        ready = here.collect(f"{key}/ready", error)
        if why := here.announce(f"{key}/lacks", _first(ready)):
            return Row(collective, size, why=why) if here.rank == 0 else None
        assert exchange is not None
        begun = time.monotonic()
        error = self._tried(exchange, what, first=n == 0)
        first_s = time.monotonic() - begun
        told = here.collect(f"{key}/tried", [error, not error and exchange.is_right()])
        if why := here.announce(f"{key}/cannot", _first([e for e, _ in told or ()])):
            self._impossible.add(collective)
            return Row(collective, size, why=why) if here.rank == 0 else None
        exchange.sent.zero_()  # what is added up again and again must not overflow
        with self._exchanging(what):
            call_s = self._warm_up(exchange) or first_s
        samples, calls = here.announce(f"{key}/often", self._often(call_s, n, until_s))
        with self._exchanging(what, more_s=samples * calls * call_s):
            took = self._samples(exchange, samples, calls, barrier=True)
        self._call_s[collective] = sorted(took)[len(took) // 2]
        every = here.collect(f"{key}/took", took)
        if every is None:
            return None
        right = all(is_right for _, is_right in told or ())
        return Row(collective, exchange.bytes, exchange.count, calls, tuple(map(tuple, every)), right)

    def _prepared(self, collective: str, size: int) -> tuple[Exchange | None, str]:
        here = self._here
        here.watch.at(f"rank {here.rank} has not made the tensors of {collective} of {bytes_text(size)}")
        try:
            return exchanges.prepare(collective, size, self._dtype, self._device, here.rank, here.ranks), ""
        except RuntimeError as e:  # out of memory
            return None, f"rank {here.rank}: {first_line(e)}"

    def _tried(self, exchange: Exchange, what: str, *, first: bool) -> str:
        """Run an exchange for the first time; return why it cannot be done at all, which shows at the first size."""
        self._here.watch.at(what)
        try:
            exchange.run()
            self._synchronize()
        except (RuntimeError, NotImplementedError, ValueError) as e:
            if not first:
                raise BrokenError(f"{what} broke off: {first_line(e)}: did a rank end?") from None
            return first_line(e)
        return ""

    @contextmanager
    def _exchanging(self, what: str, more_s: float = 0.0) -> Iterator[None]:
        self._here.watch.at(f"{what} has not ended on rank {self._here.rank}: a rank is gone, or hangs", more_s)
        try:
            yield
        except RuntimeError as e:
            raise BrokenError(f"{what} broke off: {first_line(e)}: did a rank end?") from None

    def _warm_up(self, exchange: Exchange) -> float:
        """Run it as often as asked, and return what one call took, seconds; 0: none was asked for."""
        begun = time.monotonic()
        for _ in range(self._plan.warmup):
            self._here.watch.still()
            exchange.run()
        self._synchronize()
        return (time.monotonic() - begun) / max(self._plan.warmup, 1)

    def _samples(self, exchange: Exchange, samples: int, calls: int, *, barrier: bool) -> list[float]:
        if self._device.type == "cuda":
            return self._on_gpu(exchange, samples, calls)
        took = []
        for _ in range(samples):
            self._here.watch.still()
            if barrier:
                dist.barrier()
            begun = time.perf_counter()
            for _ in range(calls):
                exchange.run()
            took.append((time.perf_counter() - begun) / calls)
        return took

    def _on_gpu(self, exchange: Exchange, samples: int, calls: int) -> list[float]:
        make: Any = torch.cuda.Event
        marks = [make(enable_timing=True) for _ in range(samples + 1)]
        exchange.run()  # the ranks' streams come together here, outside what is timed
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(calls):
                exchange.run()
            mark.record()
        self._synchronize()
        return [a.elapsed_time(b) / 1e3 / calls for a, b in pairwise(marks)]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _fits(self, collective: str, n: int, until_s: float) -> bool:
        """Return whether the least that a row needs is done in time, by the size before it."""
        sizes = self._plan.sizes
        call_s = self._call_s.get(collective, 0.0) * (sizes[n] / sizes[n - 1] if n else 1.0)
        # Two more: to fill and check the tensors takes about as long as to exchange them.
        needs = (LEAST_SAMPLES + self._plan.warmup + 3) * call_s
        return self._passed_s() + needs < until_s

    def _often(self, call_s: float, n: int, until_s: float) -> tuple[int, int]:
        """Return how many samples, of how many calls: as asked for, or as many as this row's part of the time has."""
        plan = self._plan
        calls = max(1, min(int(SAMPLE_S / max(call_s, 1e-9)) + 1, MOST_CALLS)) if call_s < SAMPLE_S else 1
        left = max(until_s - self._passed_s(), 0.0)
        part = left * plan.sizes[n] / (sum(plan.sizes[n:]) * len(plan.collectives))
        most = int(max(part, SAMPLE_S * plan.iterations) / (call_s * calls)) if call_s else plan.iterations
        return max(min(plan.iterations, most), min(LEAST_SAMPLES, plan.iterations)), calls


def measure(
    plan: Plan, here: Ranks, device: torch.device, hosts: list[str], tell: Tell
) -> tuple[list[Row], list[PairRow]]:
    """Measure all that is planned; return it on rank 0, and nothing elsewhere. Raises DlprofError."""
    hosts = here.announce("hosts", hosts)
    ours = Measurement(plan, here, device, tell)
    in_pairs = len(pair_members(hosts)) > 1 and "send_recv" in plan.collectives
    rows = list(ours.rows(plan.seconds * (1 - _FOR_PAIRS if in_pairs else 1)))
    possible = in_pairs and here.announce("pairs", any(r.samples for r in rows if r.collective == "send_recv"))
    pairs = list(ours.pairs(hosts)) if possible else []
    here.collect("over", True)  # rank 0 keeps the store until all are done with it
    return rows, pairs


def pair_members(hosts: list[str]) -> list[int]:
    """Return the ranks that are measured in pairs: all of few, else the first of each of few hosts; of two ranks none.

    Two ranks are one pair, which their send_recv is.
    """
    if len(hosts) <= 2:
        return []
    if len(hosts) <= MOST_IN_PAIRS:
        return list(range(len(hosts)))
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    return first if 1 < len(first) <= MOST_IN_PAIRS else []


def _first(errors: Sequence[Any] | None) -> str:
    return next((str(e) for e in errors or () if e), "")
