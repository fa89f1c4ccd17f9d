"""What a collective takes on any number of ranks: fitted to those of all measured sizes.

Hockney's model: a start, a time for every hop, and a time for every byte that crosses a rank's link, which depends on
the collective and the ranks as nccl-tests defines its bus bandwidth. A ring takes n − 1 hops, a tree log2 n (Thakur,
Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005). Which of the two it is shows
in the measured sizes; where they do not tell, the other one bounds the prediction.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from dlprof.analysis.communication.bandwidth import bus_factor
from dlprof.result.scale import Fit, Transfers

# One form of the fit is the right one where the other is off by so many times as much.
_CLEARLY = 2.0
# Both are as good where neither is off by more than this.
_EXACT = 0.002


@dataclass(frozen=True)
class Fits:
    """The fits of one kind of collective: the better one, and the other where the measurements allow it too."""

    best: Fit
    other: Fit | None = None

    def predicted_ns(self, size: float | None, ranks: int) -> tuple[float, float]:
        """Return how long one of so many bytes and ranks takes by either fit, ns: the better one first."""
        first = predicted_ns(self.best, size, ranks)
        return first, first if self.other is None else predicted_ns(self.other, size, ranks)


def predicted_ns(fit: Fit, size: float | None, ranks: int) -> float:
    """Return how long a collective of so many bytes over so many ranks takes, ns; without its bytes: to start it."""
    if ranks < 2:
        return 0.0
    moved = 0.0 if size is None else size * bus_factor(fit.collective, ranks)
    return fit.start_ns + fit.hop_ns * _hops(fit.hops, ranks) + fit.ns_per_byte * moved


def fitted(rows: Iterable[Transfers]) -> dict[tuple[str, bool], Fits]:
    """Fit each kind of collective, those on several hosts apart: (collective, several hosts) → fits."""
    by: dict[tuple[str, bool], list[Transfers]] = {}
    for row in rows:
        if row.ranks > 1 and row.transfer_ns > 0 and row.count > 0:
            by.setdefault((row.collective, row.hosts > 1), []).append(row)
    return {key: _fits(key, mine) for key, mine in by.items()}


def _fits(key: tuple[str, bool], rows: Sequence[Transfers]) -> Fits:
    if len({row.ranks for row in rows}) < 2:
        # Nothing shows whether the start grows: it may all be hops, or none of it.
        flat = _fit(key, rows, "")
        ranks = rows[0].ranks
        hops = _hops("ring", ranks)
        return Fits(
            flat,
            Fit(key[0], 0.0, flat.start_ns / hops, flat.ns_per_byte, "ring", flat.off, key[1]),
        )
    ring, tree = _fit(key, rows, "ring"), _fit(key, rows, "tree")
    best, other = (ring, tree) if ring.off <= tree.off else (tree, ring)
    clear = other.off > max(_CLEARLY * best.off, _EXACT)
    return Fits(best, None if clear else other)


def _hops(form: str, ranks: int) -> float:
    return {"ring": ranks - 1.0, "tree": math.log2(ranks)}.get(form, 0.0)


def _fit(key: tuple[str, bool], rows: Sequence[Transfers], form: str) -> Fit:
    """Fit the three terms, none of them below 0, to the rows; relative errors count, each row by its time in a step."""
    took = np.array([row.transfer_ns for row in rows])
    moved = np.array([(row.bytes or 0.0) * bus_factor(row.collective, row.ranks) for row in rows])
    terms = np.stack([np.ones(len(rows)), np.array([_hops(form, row.ranks) for row in rows]), moved], axis=1)
    weight = np.sqrt(np.array([row.count * row.transfer_ns for row in rows]))
    start, hop, byte = _not_negative(terms / took[:, np.newaxis], np.ones(len(rows)), weight / weight.max())
    left = terms @ np.array([start, hop, byte]) / took - 1
    off = float(np.sqrt(np.average(left**2, weights=weight)))
    named = form if form in ("ring", "tree") else ""
    return Fit(key[0], start, hop, byte, named, off, key[1])  # type: ignore[arg-type]


def _not_negative(
    terms: NDArray[np.float64], wanted: NDArray[np.float64], weight: NDArray[np.float64]
) -> tuple[float, float, float]:
    """Return the coefficients ≥ 0 of the least squares: the best of all subsets of the terms."""
    best, least = (0.0, 0.0, 0.0), math.inf
    usable = [i for i in range(terms.shape[1]) if np.any(terms[:, i] > 0)]
    for n in range(1, len(usable) + 1):
        for chosen in combinations(usable, n):
            mine = terms[:, chosen] * weight[:, np.newaxis]
            # The columns have very different units. Scaling keeps lstsq from dropping one as numerically zero.
            scale = np.linalg.norm(mine, axis=0)
            found, *_ = np.linalg.lstsq(mine / scale, wanted * weight, rcond=None)
            found = found / scale
            if np.any(found < 0):
                continue
            error = float(np.sum(((terms[:, chosen] @ found - wanted) * weight) ** 2))
            # One more term must explain something: else the fewer.
            if error < least * (1 - 1e-6) - 1e-15:
                values = dict(zip(chosen, found.tolist(), strict=True))
                best, least = (values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)), error
    return best


@dataclass(frozen=True)
class Grown:
    """The collectives of a measured step (`rows`), and on other ranks each one's group: how many, on several hosts?"""

    rows: tuple[Transfers, ...]
    ranks: tuple[int, ...]
    several_hosts: tuple[bool, ...]

    def step_ns(self, fits: Mapping[tuple[str, bool], Fits]) -> tuple[float, float]:
        """Return how long they take in a step without waiting, ns: by the better fits, by the others."""
        first = other = 0.0
        for row, ranks, several in zip(self.rows, self.ranks, self.several_hosts, strict=True):
            mine = fits.get((row.collective, several))
            if mine is None:  # no measured length of it was above zero
                continue
            best, second = mine.predicted_ns(row.bytes, ranks)
            first, other = first + row.count * best, other + row.count * second
        return first, other

    @property
    def groups(self) -> dict[tuple[str, int], tuple[int, bool]]:
        """(Collective, ranks of its group as measured) → ranks that the group has, and whether on several hosts."""
        then = zip(self.ranks, self.several_hosts, strict=True)
        return {(r.collective, r.ranks): of for r, of in zip(self.rows, then, strict=True)}


def grown(
    rows: Sequence[Transfers],
    before: Mapping[int, Sequence[Transfers]],
    now: int,
    then: int,
    known: Collection[tuple[str, bool]] = (),
) -> Grown:
    """Return the collectives of `rows`, of a job of `now` ranks, on `then` ranks.

    `before`: those of the other sizes, by their ranks. A group that has as many ranks on another number of ranks stays
    as it is; any other grows with the job. Beyond one host it takes what is known between hosts: `known` are the keys
    of the fits.
    """
    ranks = tuple(row.ranks if _stays(row, before, now) else max(round(row.ranks * then / now), 1) for row in rows)
    several = tuple(
        row.hosts > 1 or (n > row.ranks and (row.collective, True) in known) for row, n in zip(rows, ranks, strict=True)
    )
    return Grown(tuple(rows), ranks, several)


def _stays(row: Transfers, before: Mapping[int, Sequence[Transfers]], now: int) -> bool:
    if row.ranks == now:
        return False
    return any(
        other.collective == row.collective and other.ranks == row.ranks
        for n, others in before.items()
        if n != now
        for other in others
    )
