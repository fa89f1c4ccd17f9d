"""What `dlprof bandwidth` measured: how fast ranks exchange, by collective and size. bandwidth-….json holds it.

Sizes are those of nccl-tests: an all-gather's bytes are its output's, a reduce-scatter's its input's, of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dlprof.errors import DlprofError

FORMAT = 1

State = Literal["complete", "out_of_time"]

# Links fail by halves: one port of two, half of a slot's lanes. Half way there is more than neighbours' traffic.
SLOWER = 1.5


def bus_factor(collective: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines it; an all-gather counts its output."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


class Timing(msgspec.Struct, frozen=True):
    """One collective of one size. `ns`: the median of the samples, each the longest of all ranks; None: see `why`.

    `low_ns` and `high_ns`: their 10th and 90th percentile. `correct`: whether every rank had the right result.
    """

    collective: str
    bytes: int
    count: int = 0  # elements
    ns: float | None = None
    low_ns: float | None = None
    high_ns: float | None = None
    samples: int = 0
    calls: int = 0  # in one sample: its time is their mean
    correct: bool | None = None
    why: str = ""

    @property
    def algbw(self) -> float | None:
        """Algorithm bandwidth, bytes/s."""
        return self.bytes / self.ns * 1e9 if self.ns else None

    def busbw(self, ranks: int) -> float | None:
        """Return the bus bandwidth, bytes/s: what each rank's link carries, whatever the collective."""
        return None if self.algbw is None else self.algbw * bus_factor(self.collective, ranks)


class Pair(msgspec.Struct, frozen=True):
    """Two ranks that exchange `bytes` both ways at once, alone. `ns`: the median of the samples."""

    ranks: tuple[int, int]
    bytes: int
    ns: float


class Fit(msgspec.Struct, frozen=True):
    """α and β of one collective, with their standard errors (None: not known), by the model of alpha_beta.py.

    `off`: how far the measured times are from the model, as a share of them (root mean square).
    """

    collective: str
    alpha_s: float
    beta_s_per_byte: float
    alpha_error_s: float | None
    beta_error_s_per_byte: float | None
    off: float


class Bandwidth(msgspec.Struct, frozen=True):
    """One measurement. `hosts` has the host of each rank; `device` is the GPUs' name, "" for CPUs."""

    backend: str
    hosts: tuple[str, ...]
    device: str
    dtype: str
    start_ns: int  # Unix time
    timings: tuple[Timing, ...]
    pairs: tuple[Pair, ...] = ()
    fits: tuple[Fit, ...] = ()
    iterations: int = 0
    warmup: int = 0
    seconds: float = 0.0
    state: State = "complete"
    versions: Mapping[str, str] = {}
    warnings: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks that took part."""
        return len(self.hosts)

    @property
    def file(self) -> str:
        """The name of the file that it is kept in: one of files.BANDWIDTHS, for each backend and shape."""
        return f"bandwidth-{self.backend}-{self.ranks}-ranks-{len(set(self.hosts))}-hosts.json"

    def is_local(self, pair: Pair) -> bool:
        """Return whether two ranks are on one host."""
        return self.hosts[pair.ranks[0]] == self.hosts[pair.ranks[1]]

    @property
    def slow_pairs(self) -> tuple[tuple[Pair, float], ...]:
        """The pairs that take SLOWER times as long as the median of those like them (on one host, or on two).

        Each with that factor, the slowest first.
        """
        found = []
        for local in (True, False):
            like = [p for p in self.pairs if self.is_local(p) == local]
            middle = sorted(p.ns for p in like)[(len(like) - 1) // 2] if like else 0.0
            found += [(p, p.ns / middle) for p in like if p.ns > SLOWER * middle > 0]
        return tuple(sorted(found, key=lambda of: -of[1]))


def to_json(measured: Bandwidth) -> dict[str, Any]:
    """Return a measurement as plain data."""
    return {"format": FORMAT, **msgspec.to_builtins(measured)}


def from_json(data: Any) -> Bandwidth:
    """Return the measurement of plain data; raise DlprofError where it is none, or impossible."""
    if not isinstance(data, Mapping) or "timings" not in data:
        raise DlprofError("this is no file of `dlprof bandwidth`")
    if data.get("format") != FORMAT:
        raise DlprofError(f"format {data.get('format')!r}; this dlprof reads format {FORMAT}: upgrade it")
    try:
        measured = msgspec.convert({k: v for k, v in data.items() if k != "format"}, Bandwidth)
    except msgspec.ValidationError as e:
        raise DlprofError(f"this is not what `dlprof bandwidth` writes: {e}") from None
    times = [(t.bytes, t.ns) for t in measured.timings if t.ns is not None] + [(p.bytes, p.ns) for p in measured.pairs]
    if not all(0 < size < _ABSURD and 0 < ns < _ABSURD for size, ns in times):  # False for NaN
        raise DlprofError("it holds an impossible figure")
    if not all(0 <= r < measured.ranks for p in measured.pairs for r in p.ranks):
        raise DlprofError("it holds a pair of ranks that are none of its own")
    return measured


_ABSURD = 1e18  # bytes, or ns: 31 years
