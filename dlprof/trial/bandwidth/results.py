"""What the ranks measured, as rank 0 hands it on, and what becomes of it: medians, percentiles, pairs and fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from dlprof.analysis.communication.alpha_beta import MODELLED, fit
from dlprof.errors import NotMeasured
from dlprof.result.bandwidth import Bandwidth, Fit, Pair, Timing
from dlprof.trial.bandwidth.plan import Plan

OUT_OF_TIME = "the time was up"

# The file in which rank 0 hands it on.
RESULT = "measured.json"


class Row(msgspec.Struct, frozen=True):
    """One collective and size: the samples of each rank, seconds; or why there are none."""

    collective: str
    bytes: int
    count: int = 0
    calls: int = 0
    samples: tuple[tuple[float, ...], ...] = ()
    correct: bool | None = None
    why: str = ""


class PairRow(msgspec.Struct, frozen=True):
    """Two ranks, and the samples of both, seconds."""

    ranks: tuple[int, int]
    bytes: int
    samples: tuple[tuple[float, ...], ...]


class Raw(msgspec.Struct, frozen=True):
    """All that was measured; `hosts` of each rank."""

    rows: tuple[Row, ...]
    pairs: tuple[PairRow, ...]
    hosts: tuple[str, ...]
    device: str
    backend: str
    start_ns: int
    seconds: float
    versions: dict[str, str]


def summed(raw: Raw, plan: Plan) -> Bandwidth:
    """Return the measurement: of each sample the longest of all ranks, of samples the median and percentiles."""
    timings = tuple(_timing(row) for row in raw.rows)
    wrong = [f"{t.collective} of {t.bytes} bytes gave a wrong result" for t in timings if t.correct is False]
    return Bandwidth(
        backend=raw.backend,
        hosts=raw.hosts,
        device=raw.device,
        dtype=plan.dtype,
        start_ns=raw.start_ns,
        timings=timings,
        pairs=tuple(Pair(p.ranks, p.bytes, float(np.median(_longest(p.samples)))) for p in raw.pairs),
        fits=tuple(_fits(timings, len(raw.hosts))),
        iterations=plan.iterations,
        warmup=plan.warmup,
        seconds=raw.seconds,
        state="out_of_time" if any(t.why == OUT_OF_TIME for t in timings) else "complete",
        versions=raw.versions,
        warnings=tuple(wrong),
    )


def _longest(samples: Iterable[Iterable[float]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return of each sample the longest of all ranks, ns."""
    longest: np.ndarray[tuple[int], np.dtype[np.float64]] = np.max(np.array(list(samples)), axis=0) * 1e9
    return longest


def _timing(row: Row) -> Timing:
    if not row.samples:
        return Timing(row.collective, row.bytes, row.count, why=row.why)
    longest = _longest(row.samples)
    low, middle, high = (float(np.percentile(longest, p)) for p in (10, 50, 90))
    return Timing(row.collective, row.bytes, row.count, middle, low, high, len(longest), row.calls, row.correct)


def _fits(timings: Iterable[Timing], ranks: int) -> Iterator[Fit]:
    of: dict[str, list[Timing]] = {}
    for timing in timings:
        if timing.ns is not None:
            of.setdefault(timing.collective, []).append(timing)
    for collective, mine in of.items():
        if collective not in MODELLED:
            continue
        try:
            found = fit([t.bytes for t in mine], ranks, [(t.ns or 0.0) / 1e9 for t in mine], collective)
        except NotMeasured:
            continue
        alpha_error, beta_error = (
            None if math.isnan(e) else e for e in (found.alpha_error_s, found.beta_error_s_per_byte)
        )
        yield Fit(collective, found.alpha_s, found.beta_s_per_byte, alpha_error, beta_error, found.off)
