"""The step on more ranks than were measured, with its uncertainty.

The largest measured size is the basis. What changes: collectives of groups that grow, the waiting for the latest of
more ranks, and, where all ranks share one batch, what each computes of it. What longer collectives cost beside a
device's computation is replayed on its traced steps, a number for each change and rank; without a replay the exposed
transfer grows as the transfers do. Everything else of the step stays as it is.

The interval is of 95 %: the noise of the measured step, how far the fits are off, whether collectives start in a ring
or in a tree where that does not show, the latest rank with and without a tail beyond what was seen, and what predicting
the largest size from the others was off by, once for each doubling of the ranks.

What a collective takes is Hockney's model, fitted to those of all sizes: a start, a time for every hop, and a time for
every byte that crosses a rank's link, which depends on the collective and the ranks as nccl-tests defines its bus
bandwidth. A ring takes n − 1 hops, a tree log2 n (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication
Operations in MPICH, 2005). Which of the two it is shows in the measured sizes; where they do not tell, the other one
bounds the prediction.

How long ranks wait for the last of them is the mean of a maximum. A step of a synchronous job ends when the slowest
rank has done its work. If n ranks' own times are independent draws from one distribution F, the slowest takes
∫ Q(u) d(uⁿ) in the mean, with Q the quantiles of F: the mean of the largest order statistic (David, Nagaraja: Order
Statistics, 2003). A rank's own time is what the rank usually takes, and what a single step takes longer. Ranks differ
in the former for good: a few of them show no more than how far they are apart, and more ranks are taken to be normally
distributed. Of single steps there are many; beyond their 90th percentile they go on exponentially, with the mean excess
of what was seen there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import Literal, cast

import numpy as np
import pandas as pd
from msgspec.structs import replace as changed
from numpy.typing import NDArray

from dlprof.analysis.communication.bandwidth import bus_factor
from dlprof.analysis.engine import ALSO, RANK, Frame, Maybe, MeasureFailed, RankData, RankFacts, maybe, measure, needs
from dlprof.analysis.scaling.study import Sizes
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.device import device_work
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from dlprof.result.scale import Fit, Prediction, Scaling, Size, Study, Transfers

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
        hop_ns = flat.start_ns / _hops("ring", rows[0].ranks)
        return Fits(flat, Fit(key[0], 0.0, hop_ns, flat.ns_per_byte, "ring", flat.off, key[1]))
    ring, tree = _fit(key, rows, "ring"), _fit(key, rows, "tree")
    best, other = (ring, tree) if ring.off <= tree.off else (tree, ring)
    clear = other.off > max(_CLEARLY * best.off, _EXACT)
    return Fits(best, None if clear else other)


def _hops(form: str, ranks: int) -> float:
    return {"ring": ranks - 1.0, "tree": math.log2(ranks)}.get(form, 0.0)


def _fit(key: tuple[str, bool], rows: Sequence[Transfers], form: Literal["ring", "tree", ""]) -> Fit:
    """Fit the three terms, none of them below 0, to the rows; relative errors count, each row by its time in a step."""
    took = np.array([row.transfer_ns for row in rows])
    moved = np.array([(row.bytes or 0.0) * bus_factor(row.collective, row.ranks) for row in rows])
    terms = np.stack([np.ones(len(rows)), np.array([_hops(form, row.ranks) for row in rows]), moved], axis=1)
    weight = np.sqrt(np.array([row.count * row.transfer_ns for row in rows]))
    start, hop, byte = _not_negative(terms / took[:, np.newaxis], np.ones(len(rows)), weight / weight.max())
    left = terms @ np.array([start, hop, byte]) / took - 1
    off = float(np.sqrt(np.average(left**2, weights=weight)))
    return Fit(key[0], start, hop, byte, form, off, key[1])


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


# Ranks of a run that are replayed.
MOST_RANKS = 8

COLUMNS = ("change", "other", "ratio")


@dataclass(frozen=True)
class Change:
    """A step on other ranks: how many a group of so many ranks then has, and how much of a kernel's work is left."""

    # (collective, ranks) → ranks, and whether these are on several hosts; others stay.
    groups: Mapping[tuple[str, int], tuple[int, bool]]
    compute: float = 1.0


def replays(
    changes: Sequence[Change], fits: Mapping[tuple[str, bool], Fits], several_hosts: bool, rank: RankData
) -> pd.DataFrame:
    """Return how long the rank's step is with each change, as a multiple of its step as it is.

    Columns: change (its place), other (1: by the other fits, 0: by the better ones), ratio. No rows where the trace
    cannot be replayed.
    """

    def ratios(
        what_if: Maybe[WhatIf] = maybe(what_if),
        device_work: Maybe[Frame] = maybe(device_work),
        rank: RankFacts = needs(RANK),
    ) -> pd.DataFrame:
        steps = what_if.or_none()
        if steps is None or steps.measured_ns <= 0:
            return pd.DataFrame({c: pd.Series(dtype=float) for c in COLUMNS})
        work = device_work.get().iloc[steps.replay.rows]
        rows = []
        for n, change in enumerate(changes):
            for other in (0, 1):
                durations = _durations(work, steps.replay.durations, change, fits, several_hosts, other, rank)
                rows.append((n, other, steps.left(durations)))
        return pd.DataFrame(rows, columns=list(COLUMNS))

    return rank.call(ratios)


def _durations(
    work: pd.DataFrame,
    now: NDArray[np.int64],
    change: Change,
    fits: Mapping[tuple[str, bool], Fits],
    several_hosts: bool,
    other: int,
    rank: RankFacts,
) -> NDArray[np.int64]:
    """Return how long each piece of work takes.

    The time of a collective beyond its fit is waiting for other ranks, and shrinks in proportion to their computation.
    """
    then = now.astype(float)
    if change.compute != 1.0:
        least = np.minimum(now, device.LEAST_KERNEL_NS)
        then = np.where(host.is_kind(work, "kernel"), least + (now - least) * change.compute, then)
    moving = np.flatnonzero(host.is_kind(work, "communication"))
    frame = work.iloc[moving][["collective", "group", "bytes"]].astype({"collective": "str", "group": "str"})
    groups = rank.trace_facts.get("groups") or {}
    world = int(rank.trace_facts.get("world_size") or rank.facts.get("world_size") or 1)
    for key, places in frame.groupby(["collective", "group", "bytes"]).indices.items():
        collective, group, size = cast("tuple[str, str, int]", key)
        ranks = len((groups.get(group) or {}).get("ranks") or ()) or world
        known = float(size) if size > 0 else None
        to, several = change.groups.get((collective, ranks), (ranks, several_hosts))
        moves = _predicted_ns(fits, (collective, several_hosts), other, known, ranks)
        longer = _predicted_ns(fits, (collective, several), other, known, to) - moves
        took = now[moving[places]]
        then[moving[places]] = took + longer - np.maximum(took - moves, 0.0) * (1 - change.compute)
    durations: NDArray[np.int64] = np.rint(np.maximum(then, 0.0)).astype(np.int64)
    return durations


def _predicted_ns(
    fits: Mapping[tuple[str, bool], Fits], key: tuple[str, bool], other: int, size: float | None, ranks: int
) -> float:
    """Return what a collective takes by the fits of its kind, ns; 0 where there are none."""
    mine = fits.get(key) or fits.get((key[0], not key[1]))
    return 0.0 if mine is None else mine.predicted_ns(size, ranks)[other]


def replays_of(paths: Mapping[int, Sequence[Path]], jobs: int | None = None) -> Replays:
    """Return a function that replays the runs at these paths, by their number of ranks.

    At most MOST_RANKS ranks of a run are replayed, spread evenly. It returns {} where nothing can be replayed.
    """

    def replayed(
        ranks: int, changes: Sequence[Change], fits: Mapping[tuple[str, bool], Fits]
    ) -> dict[int, tuple[float, float]]:
        frames = []
        for path in paths.get(ranks, ()):
            run = open_run(path)
            chosen = run.ranks[:: -(-len(run.ranks) // MOST_RANKS)]
            several = len(run.hosts) > 1
            also = partial(replays, (Change({}), *changes), fits, several)
            with suppress(NotMeasured, MeasureFailed):
                frames.append(measure(replace(run, ranks=chosen), [], jobs, also=also).frame(ALSO))
        if not frames or not sum(map(len, frames)):
            return {}
        means = pd.concat(frames).groupby(["change", "other"])["ratio"].mean()
        now = means[0]
        return {n: (float(means[n + 1, 0] / now[0]), float(means[n + 1, 1] / now[1])) for n in range(len(changes))}

    return replayed


# The sizes that are predicted, where larger than the largest measured one.
TARGETS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

# What a device or a core computes of the batch, and what does not depend on it.
_OF_BATCH = ("computation", "copy", "input_wait")

# No interval of a step reaches below this share of it.
_LEAST = 0.02

# What a prediction is off by at least, as a standard error: half of what two recordings of a quiet job differ by.
_ALWAYS = 0.005

# Replays the runs of a size, given by its ranks, with changes: the place of a change → its step over the measured one
# by the better fits, and by the others. {}: nothing can be replayed.
Replays = Callable[[int, Sequence[Change], Mapping[tuple[str, bool], Fits]], Mapping[int, tuple[float, float]]]


@dataclass(frozen=True)
class Measured:
    """A size, and what its runs tell of its scaling."""

    size: Size
    scaling: Scaling


@dataclass(frozen=True)
class Model:
    """What some sizes say of other numbers of ranks; the last is the basis.

    `strong`: all ranks share one batch. `off`: how far the largest size, predicted from the others, was off for each
    doubling of the ranks.
    """

    sizes: tuple[Measured, ...]
    strong: bool
    replays: Replays
    off: float = 0.0

    @property
    def basis(self) -> Measured:
        """The largest size."""
        return self.sizes[-1]

    @cached_property
    def fits(self) -> Mapping[tuple[str, bool], Fits]:
        """What the collectives of all sizes take."""
        return fitted(row for m in self.sizes for row in m.scaling.transfers)

    def predicted(self, targets: Sequence[int]) -> tuple[Prediction, ...]:
        """Return the prediction for each number of ranks."""
        rows = [self._grown(n) for n in targets]
        left = [self._compute_left(n) for n in targets]
        changes = [Change(r.groups, share) for r, share in zip(rows, left, strict=True)]
        replayed = self.replays(self.basis.size.ranks, changes, self.fits)
        return tuple(self._one(n, rows[i], left[i], replayed.get(i)) for i, n in enumerate(targets))

    def _grown(self, ranks: int) -> Grown:
        before = {m.size.ranks: m.scaling.transfers for m in self.sizes[:-1]}
        return grown(self.basis.scaling.transfers, before, self.basis.size.ranks, ranks, self.fits)

    def _compute_left(self, ranks: int) -> float:
        """Return how long what is computed of a batch takes, over the basis'; 1 where batches stay as large."""
        if not self.strong:
            return 1.0
        shares = np.array([1.0 / m.size.ranks for m in self.sizes])
        fixed, each = _line(shares, np.array([_of_batch(m.size) for m in self.sizes]))
        now = fixed + each / self.basis.size.ranks
        return (fixed + each / ranks) / now if now > 0 else 1.0

    def _one(self, ranks: int, rows: Grown, left: float, replayed: tuple[float, float] | None) -> Prediction:
        size, known = self.basis.size, self.basis.scaling
        now, _ = self._grown(size.ranks).step_ns(self.fits)
        grows = [then / now if now > 0 else 1.0 for then in rows.step_ns(self.fits)]
        exposed, less = known.transfer_ns or 0.0, _of_batch(size) * (1 - left)
        # The step with longer collectives and shorter kernels: by the better fits, and by the others.
        waited = (known.wait_ns or 0.0) * left
        alone = [size.step_ns - less + exposed * (g - 1) + waited - (known.wait_ns or 0.0) for g in grows]
        if replayed is not None:
            alone = [size.step_ns * ratio for ratio in replayed]
        wait, wait_off = self._waiting(ranks, left)
        step, other = (a + wait - waited for a in alone)
        error = 2 * math.hypot(
            size.noise_ns or 0.0,
            _ALWAYS * step,
            max((f.best.off for f in self.fits.values()), default=0.0) * exposed * max(grows[0], 1.0),
            wait_off,
            self.off * step * math.log2(max(ranks / size.ranks, 1.0)) / 2,
        )
        low, high = max(min(step, other) - error, _LEAST * step), max(step, other) + error
        transfer = max(exposed + alone[0] - (size.step_ns - less + waited - (known.wait_ns or 0.0)), 0.0)
        return Prediction(
            ranks=ranks,
            step_ns=step,
            low_ns=low,
            high_ns=high,
            efficiency=self._efficiency(ranks, step),
            efficiency_low=self._efficiency(ranks, high),
            efficiency_high=self._efficiency(ranks, low),
            transfer_ns=transfer,
            wait_ns=wait,
            samples_per_s=self._rate(ranks, step),
        )

    def _waiting(self, ranks: int, left: float) -> tuple[float, float]:
        """Return the exposed waiting of the mean rank, ns, and how far that may be off.

        Ranks that compute less are apart by as much less.
        """
        size, known = self.basis.size, self.basis.scaling
        if known.wait_ns is None:
            return 0.0, 0.0
        waits = {m.size.ranks: w for m in self.sizes if (w := m.scaling.wait_ns) is not None}
        late = Lateness(known.uneven_ns, known.late_ns)
        latest = {n: late.mean_of_latest(n) for n in waits}
        whole = sum(one * one for one in latest.values())
        if not whole:
            return known.wait_ns * left, 0.0
        # How much of the lateness is exposed, as all sizes show it.
        share = sum(waits[n] * latest[n] for n in waits) / whole
        now, then = share * latest[size.ranks], share * late.mean_of_latest(ranks)
        bounded = share * late.mean_of_latest(ranks, tail=False)
        off = math.hypot(
            (then - bounded) / 2,
            (known.wait_ns - now) * (then / now - 1) / 2 if now else 0.0,
            (then - now) * uncertainty(size.ranks) if late.spread_ns else 0.0,
            late.spread_ns / math.sqrt(size.ranks),  # of the mean of other ranks
        )
        return max(known.wait_ns + then - now, 0.0) * left, off * left

    def _efficiency(self, ranks: int, step_ns: float) -> float:
        size = self.basis.size
        # Each of N ranks does the same work in a step as one of the basis' n ranks, or n ÷ N of it.
        work = size.ranks / ranks if self.strong else 1.0
        return size.efficiency * size.step_ns / step_ns * work

    def _rate(self, ranks: int, step_ns: float) -> float | None:
        size = self.basis.size
        if not size.samples:
            return None
        return 1e9 / step_ns * size.samples * (1.0 if self.strong else ranks / size.ranks)


def studied(name: str, sizes: Sizes, targets: Sequence[int] = TARGETS, replays: Replays = lambda *_: {}) -> Study:
    """Return a study: the sizes, what they say of other numbers of ranks, and how well they say it of the largest."""
    study = Study(name, sizes.mode, sizes.sizes, left_out=sizes.left_out, doubts=sizes.doubts)
    known = tuple(
        Measured(size, next((s for run in runs if (s := run.result.scaling)), Scaling()))
        for size, runs in zip(sizes.sizes, sizes.runs, strict=True)
    )
    if why := _unpredictable(sizes, known):
        return changed(study, why=why)
    model = Model(known, sizes.mode == "strong", replays)
    check, off = None, 0.0
    several = [m for m in known[:-1] if m.size.ranks > 1]
    if several:
        largest = known[-1].size
        check = replace(model, sizes=known[:-1]).predicted([largest.ranks])[0]
        off = abs(check.step_ns / largest.step_ns - 1) / math.log2(largest.ranks / known[-2].size.ranks)
    further = [n for n in targets if n > known[-1].size.ranks]
    fits = tuple(f.best for f in model.fits.values())
    predictions = replace(model, off=off).predicted(further) if further else ()
    return changed(study, check=check, predictions=predictions, fits=fits, doubts=(*sizes.doubts, *_doubts(model)))


def _unpredictable(sizes: Sizes, known: Sequence[Measured]) -> str:
    """Return why nothing can be predicted; "" where it can."""
    if len(known) < 2:
        return "one size says nothing of others: record the job on another number of ranks"
    if sizes.mode == "mixed":
        return "the batch grows neither with the ranks nor stays as it is: no larger size follows"
    if not known[-1].scaling.transfers:
        return "the collectives of the largest size are not known: its trace lacks them, or ranks are missing"
    return ""


def _doubts(model: Model) -> list[str]:
    doubts, largest = [], model.basis.size
    if largest.hosts < 2:
        doubts.append("All runs are of one host: what a network between hosts takes is not in the predictions.")
    if any(f.best.hops == "" and f.best.start_ns > 0 for f in model.fits.values()):
        doubts.append("Only one size has collectives: how their start grows with the ranks is bounded, not measured.")
    if model.basis.scaling.wait_ns is None:
        doubts.append("How long ranks wait for each other is not known, and is taken to stay as it is.")
    return doubts


def _of_batch(size: Size) -> float:
    """Return what a rank spends on its share of the batch, ns of a step."""
    return sum(size.parts.get(category, 0.0) for category in _OF_BATCH)


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Return the line through some points, neither term below 0: what does not depend on x, and what each x adds."""
    slope, start = np.polyfit(x, y, 1)
    if start < 0:
        return 0.0, float((x * y).sum() / (x * x).sum())
    return (float(y.mean()), 0.0) if slope < 0 else (float(start), float(slope))


# Where the tail begins.
TAIL = 0.9

# At least so many ranks show their distribution; with fewer, a normal one is assumed.
ENOUGH_RANKS = 64

_POINTS = 512  # of each distribution: their sum has the square of it

_ALONE = 1 << 15  # of one whose other is nothing

_INTEGRAL = 4096


@dataclass(frozen=True)
class Lateness:
    """How far ranks are apart: `uneven_ns` and `late_ns` of result.scale.Scaling."""

    uneven_ns: tuple[float, ...]
    late_ns: tuple[float, ...]

    def mean_of_latest(self, ranks: int, *, tail: bool = True) -> float:
        """Return by how much the latest of so many ranks is later than their mean, ns.

        Without `tail`: no rank is later than the latest that was seen.
        """
        if ranks < 2:
            return 0.0
        values = self._with_tail if tail else self._seen
        # The quantile v of the maximum of n is the distribution's quantile v^(1/n).
        at = ((np.arange(_INTEGRAL) + 0.5) / _INTEGRAL) ** (1.0 / ranks)
        found = np.interp(at, (np.arange(len(values)) + 0.5) / len(values), values)
        return float(found.mean() - values.mean())

    @property
    def spread_ns(self) -> float:
        """How far ranks are apart for good: the standard deviation."""
        return float(np.std(self.uneven_ns)) if self.uneven_ns else 0.0

    @cached_property
    def _with_tail(self) -> NDArray[np.float64]:
        normal = 0 < len(self.uneven_ns) < ENOUGH_RANKS and self.spread_ns > 0
        uneven = self.spread_ns * _normal(self._points) if normal else _drawn(self.uneven_ns, self._points)
        return _sum(uneven, _drawn(self.late_ns, self._points, tail=True))

    @cached_property
    def _seen(self) -> NDArray[np.float64]:
        return _sum(_drawn(self.uneven_ns, self._points), _drawn(self.late_ns, self._points))

    @property
    def _points(self) -> int:
        return _POINTS if any(self.uneven_ns) and any(self.late_ns) else _ALONE


def _sum(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distribution of the sum of two independent draws, as sorted values."""
    sums: NDArray[np.float64] = np.sort(np.add.outer(a, b).ravel())
    return sums


def _drawn(values: Sequence[float], points: int, *, tail: bool = False) -> NDArray[np.float64]:
    """Return so many evenly spaced quantiles of the distribution that some values show; one 0 where all are 0."""
    if not any(values):
        return np.zeros(1)
    seen = np.sort(np.asarray(values, dtype=float))
    at, places = (np.arange(points) + 0.5) / points, (np.arange(len(seen)) + 0.5) / len(seen)
    found: NDArray[np.float64] = np.interp(at, places, seen)
    if tail and len(seen) * (1 - TAIL) >= 2:
        begin = float(np.interp(TAIL, places, seen))
        excess = float(seen[places > TAIL].mean() - begin)
        beyond = at > TAIL
        found[beyond] = begin + excess * np.log((1 - TAIL) / (1 - at[beyond]))
    return found


def _normal(points: int) -> NDArray[np.float64]:
    """Return so many evenly spaced quantiles of the standard normal distribution."""
    draw = NormalDist()
    return np.array([draw.inv_cdf((n + 0.5) / points) for n in range(points)])


def uncertainty(ranks: int) -> float:
    """Return the relative standard error of a standard deviation that so many ranks show."""
    return 1.0 / math.sqrt(2.0 * max(ranks - 1, 1))
