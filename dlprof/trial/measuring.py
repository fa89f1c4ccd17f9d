"""The steps and losses of one short run, and the comparison of two runs.

Steps are rank 0's, measured as in a report. Losses are compared step by step, on all ranks, from the same seed. What a
change may differ by is measured: two runs without it, of other seeds, say how far apart chance brings losses. Where
these are equal, since the script sets the seed, the differences from one step to the next say it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlprof import run_folder
from dlprof.analysis.engine import Frame, Job, RankData
from dlprof.analysis.engine.ranks import RankAnswer
from dlprof.analysis.settings import Settings, loader_of
from dlprof.analysis.step.throughput import share, work_done
from dlprof.analysis.timeline.steady import ENOUGH, light_steps
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read.run import Rank, Run, open_run
from dlprof.result.tried import Of


@dataclass(frozen=True)
class Steps:
    """The steady steps of a short run: their numbers and lengths, ns.

    `epochs_ns`: the mean training step over whole epochs including what lies between steps, None without a whole epoch.
    `loop_ns`: the same from the first to the last steady step. `ahead`: batches that the loader prefetches.
    `batch_size`: of the training loader. `samples`: of a step of the whole job, None if not known. `start_ns`: from the
    import of PyTorch to the first batch, None if not known.
    """

    numbers: NDArray[np.int64]
    lengths_ns: NDArray[np.float64]
    epochs_ns: float | None
    loop_ns: float
    ahead: int = 0
    batch_size: int | None = None
    samples: float | None = None
    start_ns: float | None = None

    def ns(self, of: Of) -> float:
        """Return what a change is measured by; raise NotMeasured if that is not known."""
        if of == "start" and self.start_ns is None:
            raise NotMeasured("when the run began was not recorded")
        return self.loop_ns if of == "loop" else self.start_ns or 0.0 if of == "start" else self.step_ns

    @property
    def step_ns(self) -> float:
        """The mean steady step."""
        return float(self.lengths_ns.mean())


def steps_of(folder: Path) -> Steps:
    """Return the steps of a run folder; raise NotMeasured if fewer than ENOUGH are steady."""
    try:
        run = open_run(folder)
    except DlprofError as e:
        raise NotMeasured(str(e)) from None
    ranks = run.ranks
    if not ranks or ranks[0].index != 0:
        raise NotMeasured("rank 0 recorded no step")
    return replace(steps_of_rank(ranks[0]), samples=_samples(run))


def _samples(run: Run) -> float | None:
    """Return the samples of a mean step of the whole job, from those of rank 0; None if not known."""
    job = Job(run, {r.index: RankAnswer({}, r.facts, {}, ()) for r in run.ranks})
    try:
        mine = float(RankData(run.ranks[0]).once(work_done)["samples"].iloc[0])
    except NotMeasured:
        return None
    times = share(job).times
    return mine * times if times and math.isfinite(mine) else None


def steps_of_rank(rank: Rank) -> Steps:
    """Return the steps of one rank; raise NotMeasured if fewer than ENOUGH are steady."""
    rows = RankData(rank).once(light_steps)
    steady = rows["steady"].to_numpy(dtype=bool)
    if steady.sum() < ENOUGH:
        raise NotMeasured(f"{int(steady.sum())} steady steps are too few")
    loader = loader_of(rank.facts)
    start, dur = rows["start_ns"].to_numpy(), rows["dur_ns"].to_numpy()
    trains = (rows["kind"].astype("str") == "train").to_numpy()
    at = np.flatnonzero(steady)
    counted = np.arange(len(rows))
    begins = counted[trains & (rows["first"].to_numpy() != 0) & (counted > at[0])]
    whole = None
    if len(begins) > 1:
        whole = float(start[begins[-1]] - start[begins[0]]) / int(trains[begins[0] : begins[-1]].sum())
    stretch = float(start[at[-1]] + dur[at[-1]] - start[at[0]]) / int(trains[at[0] : at[-1] + 1].sum())
    return Steps(
        numbers=rows["step"].to_numpy()[steady],
        lengths_ns=rows["length_ns"].to_numpy(dtype=float)[steady],
        epochs_ns=whole,
        loop_ns=stretch,
        ahead=ahead(loader),
        batch_size=loader.get("batch_size"),
        start_ns=_start_ns(rank, rows),
    )


def _start_ns(rank: Rank, rows: Frame) -> float | None:
    """Return how long a rank took from the import of PyTorch to its first batch; None if not known."""
    began = (rank.facts.get("clock") or {}).get("unix_ns")
    first = int(rows["start_ns"].iloc[0]) + max(int(rows["fetch_ns"].iloc[0]), 0)
    return float(first - began) if isinstance(began, int) and began < first else None


def ahead(loader: Settings) -> int:
    """Return how many batches a loader prefetches: its own speed shows only after as many steps."""
    return (loader.get("num_workers") or 0) * (loader.get("prefetch_factor") or 2)


def epoch_of(rank: Rank) -> int | None:
    """Return the number of steps in an epoch of a recorded rank; None without a whole epoch."""
    try:
        rows = RankData(rank).table("steps")
    except NotMeasured:
        return None
    begins = rows["step"].to_numpy()[rows["first"].to_numpy() != 0]
    return int(np.median(np.diff(begins))) if len(begins) > 1 else None


def log_ratio(a: Steps, b: Steps, of: Of) -> float:
    """Return the logarithm of how many times faster `b` is than `a`; raise NotMeasured if they cannot be compared.

    Steady steps are compared from the same step number on, after the batches that the loaders had prefetched.
    """
    if a.batch_size != b.batch_size and None not in (a.batch_size, b.batch_size):
        raise NotMeasured(f"its batches are of {b.batch_size}, not of {a.batch_size}")
    if of == "start":
        return math.log(a.ns(of) / b.ns(of))
    if of == "loop":
        whole = (a.epochs_ns, b.epochs_ns)
        before, after = (a.loop_ns, b.loop_ns) if None in whole else whole
        return math.log(before / after)  # type: ignore[operator]
    first, last = max(a.numbers[0], b.numbers[0]), min(a.numbers[-1], b.numbers[-1])
    first += min(max(a.ahead, b.ahead), max(int(last - first) // 3, 0))
    before, after = (_mean_from(steps, first) for steps in (a, b))
    return math.log(before / after)


def epochs_log_ratio(a: Steps, b: Steps) -> float | None:
    """Return the same over whole epochs; None if one of the runs has no whole epoch."""
    return None if a.epochs_ns is None or b.epochs_ns is None else math.log(a.epochs_ns / b.epochs_ns)


def _mean_from(steps: Steps, first: int) -> float:
    chosen = steps.numbers >= first
    if chosen.sum() < ENOUGH:
        raise NotMeasured("the runs have fewer than 5 steady steps in common")
    return float(steps.lengths_ns[chosen].mean())


# Losses.

LEAST_LOSSES, MOST_LOSSES = 8, 100  # losses of a rank: that both runs must have, and that are compared

# Of two pairs of runs that differ by the seed alone, one is no more than so many times as far apart as the other.
MARGIN = 1.5

# The mean difference of so many losses is no further from 0 than so many times its standard error.
SURE = 3.0

Losses = Mapping[tuple[str, int], float]  # of a rank, in their order
Compared = Literal["", "equal", "within", "differ"]


def losses_of(run: Path) -> Losses:
    """Return the losses of a run folder by rank and step; what cannot be read is left out."""
    found: dict[tuple[str, int], float] = {}
    for rank in run_folder.in_ranks(run):
        for n, line in enumerate(run_folder.lines_of(rank, "losses")[:MOST_LOSSES]):
            with suppress(ValueError, TypeError, KeyError):
                loss = json.loads(line)["loss"]
                found[rank.name, n] = math.nan if loss is None else float(loss)
    return found


def compared(plain: Losses, changed: Losses, other_seed: Losses) -> Compared:
    """Compare losses without and with a change by those of a run without it and with another seed; "": too few."""
    common = sorted(plain.keys() & changed.keys())
    if len(common) < LEAST_LOSSES:
        return ""
    apart = [changed[key] - plain[key] for key in common]
    if all(plain[key] == changed[key] or (math.isnan(plain[key]) and math.isnan(changed[key])) for key in common):
        return "equal"
    seeds = _rms([plain[key] - other_seed[key] for key in common if key in other_seed])
    if seeds > 0:
        return "within" if _rms(apart) <= MARGIN * seeds else "differ"
    steps = _rms([plain[key] - plain[key[0], key[1] - 1] for key in common if (key[0], key[1] - 1) in plain])
    mean = abs(math.fsum(apart)) / len(apart)
    return "within" if _rms(apart) <= steps and mean <= SURE * steps / math.sqrt(len(apart)) else "differ"


def _rms(differences: Sequence[float]) -> float:
    """Return the root of the mean square."""
    return math.sqrt(math.fsum(x * x for x in differences) / len(differences)) if differences else 0.0
