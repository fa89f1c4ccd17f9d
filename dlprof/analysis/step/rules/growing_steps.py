"""Steps take longer and longer, or much longer from one step on.

A list that every step appends to, a metric of all outputs so far, a hidden state whose graph is kept, a cache that
fills, numbers that become denormal: the mean step then depends on how long the job runs, and the last step says more of
its end than the mean.

Needs the step log with forty steady steps or more. The steps are split into ten stretches, and their medians compared.
Steps grow where nearly every stretch is longer than those before it; they jump where all stretches before one are
alike, and all after it. On a CPU one phase of the step has to stay as it is: where all become slower alike, the machine
has become slower, which this rule does not report; nor does it where batches or texts grow, or where the training
thread waits for a core because other programs began to use more of them. On a GPU only growth is reported.

Saving: what the mean step would be shorter by if all steps were as long as the first ones. These have grown already,
and a longer job grows on: removing the cause may give more.

What to change: the line that the report names, in the phase that grows. Keep sums and counts instead of all outputs;
detach what one step hands to the next; bound what is kept. Where values of the model or of the optimizer's state were
seen to become subnormal (on a CPU a sample is looked at), or forward and backward jump, `torch.set_flush_denormal(
True)`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, by_rank, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.machine.cores import line_of
from dlprof.analysis.machine.samples import WAITED, held, placed_samples
from dlprof.analysis.memory.memory import memory_ends
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import costliest, costly_lines
from dlprof.analysis.timeline.steady import STRETCHES, device_type, standard_error, steady_steps
from dlprof.errors import NotMeasured
from dlprof.result import Change
from dlprof.units import count, digits, duration, percent

# The fewest steps that are judged, four for each stretch: a median of fewer is one long step.
FEWEST = 4 * STRETCHES

# The last stretch takes at least this many times as long as the first one. The medians of stretches of healthy jobs on
# shared machines differ by up to 1.2.
LEAST_LONGER = 1.3

# Of all pairs of stretches, so many have the later one longer; no step between two neighbours is more than this share
# of the rise, else it is a jump.
_IN_ORDER, _AT_ONCE = 0.85, 0.6

# Stretches are alike within this factor, and so is a phase that stays as it is. A phase counts from this share of the
# step on.
_ALIKE, _PART = 1.15, 0.03

# Other programs make steps longer where they use so many cores more than before, and the training thread's wait for a
# core is at least this share of what the steps are longer by.
_CORES, _OF_RISE = 0.2, 0.3

# From this share of the values on, subnormal ones make steps longer: each takes up to a hundred times as long.
_NOTABLE = 0.005

_PHASES = ("fetch", "forward", "backward", "optimizer", "rest")
_WHERE = {
    "fetch": "in waiting for data",
    "forward": "in forward passes",
    "backward": "in backward passes",
    "optimizer": "in the optimizer",
    "rest": "between the phases, in the script's own lines",
}


@per_rank
def trends(
    steady_steps: Frame = needs(steady_steps),
    placed_samples: Maybe[Frame] = maybe(placed_samples),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return one row where the steps of a rank grow or jump, none where they do not.

    Columns: kind (grows, jumps), first_ns and last_ns (the median step of the first and the last stretch), steps (all
    of them), at_step (the first step of the longer ones; of steps that grow, the first one), per_step_ns (how much
    longer each step is than the one before), phase (in which most of the rise is), share (of the rise in it), gone_ns
    (the mean step less the first ones) and its standard error noise_ns. Raises NotMeasured with too few steps.
    """
    if len(steady_steps) < FEWEST:
        raise NotMeasured(f"{count(len(steady_steps), 'steady step')} are too few to see whether steps grow")
    stretches = np.array_split(np.arange(len(steady_steps)), STRETCHES)
    length = steady_steps["length_ns"].to_numpy(dtype=float)
    known = {p: steady_steps[f"{p}_ns"].to_numpy(dtype=float).clip(0.0) for p in _PHASES[:-1]}
    known["rest"] = (steady_steps["dur_ns"].to_numpy(dtype=float) - sum(known.values())).clip(0.0)
    medians = np.array([np.median(length[s]) for s in stretches])
    phases = {p: np.array([np.median(ns[s]) for s in stretches]) for p, ns in known.items()}
    columns = [
        "kind",
        "first_ns",
        "last_ns",
        "steps",
        "at_step",
        "per_step_ns",
        "phase",
        "share",
        "gone_ns",
        "noise_ns",
    ]
    number = steady_steps["step"].to_numpy()
    edges = [(int(number[s[0]]), int(number[s[-1]])) for s in stretches]
    split = _jump(medians) or _jump_within(medians, phases) or _jump_seen(medians, edges, rank)
    kind = "grows" if _grows(medians) else "jumps" if split else ""
    on_cpu = device_type(rank) in (None, "cpu")
    longer = any(_rises(steady_steps[c].to_numpy(dtype=float), stretches) for c in ("tokens", "inputs", "samples"))
    first = float(medians[: split or 1].mean())
    crowded = (
        bool(kind) and on_cpu and _crowded(placed_samples, steady_steps, stretches, split, 1 - first / medians[-1])
    )
    alike = on_cpu and not _uneven(phases, medians)
    if not kind or longer or alike or crowded or (kind == "jumps" and not on_cpu):
        return pd.DataFrame(columns=columns).astype(dict.fromkeys(columns[1:5], float))
    rises = {p: float(ns[-1] - ns[: split or 1].mean()) for p, ns in phases.items()}
    phase, rise = max(rises, key=lambda p: rises[p]), float(medians[-1]) - first
    row = {
        "kind": kind,
        "first_ns": first,
        "last_ns": float(medians[-1]),
        "steps": len(steady_steps),
        "at_step": int(steady_steps["step"].iloc[int(stretches[split][0])]),
        "per_step_ns": rise / len(steady_steps) * STRETCHES / (STRETCHES - 1),
        "phase": phase,
        "share": min(rises[phase] / rise, 1.0),
        "gone_ns": max(float(length.mean()) - first, 0.0),
        "noise_ns": standard_error(length[stretches[0]]),
    }
    return pd.DataFrame([row], columns=columns)


def _rises(counts: NDArray[np.float64], stretches: list[NDArray[np.int64]]) -> bool:
    """Return whether the last steps train on more than the first: texts that become longer, larger batches."""
    first, last = np.median(counts[stretches[0]]), np.median(counts[stretches[-1]])
    return bool(first > 0 and last > _ALIKE * first)


def _grows(medians: NDArray[np.float64]) -> bool:
    """Return whether nearly every stretch is longer than those before it, and no single one is most of the rise."""
    later = np.triu(np.ones((STRETCHES, STRETCHES), bool), 1)
    ordered = (medians[None, :] > medians[:, None])[later].mean()
    rise = medians[-1] - medians[0]
    steepest = float(np.diff(medians).max())
    return bool(medians[-1] >= LEAST_LONGER * medians[0] and ordered >= _IN_ORDER and steepest <= _AT_ONCE * rise)


def _jump(medians: NDArray[np.float64]) -> int:
    """Return the first of the longer stretches where all before it are alike, and all after it; 0: there is none.

    The stretch in which the jump is lies between the two.
    """
    for split in range(2, STRETCHES - 2):
        before, after = medians[:split], medians[split + 1 :]
        alike = before.max() <= _ALIKE * before.min() and after.max() <= _ALIKE * after.min()
        if alike and after.min() >= LEAST_LONGER * before.max() and medians[split] > before.max():
            return split
    return 0


def _jump_within(medians: NDArray[np.float64], phases: dict[str, NDArray[np.float64]]) -> int:
    """Return the same where one phase jumps, which is most of the rise: the others vary, as beside other programs."""
    most = max(phases.values(), key=lambda ns: float(ns[-1] - ns[0]))
    split = _jump(most)
    longer = bool(split) and medians[split + 1 :].min() >= LEAST_LONGER * medians[:split].max()
    return split if longer and most[-1] - most[0] >= (medians[-1] - medians[0]) / 2 else 0


def _jump_seen(medians: NDArray[np.float64], edges: list[tuple[int, int]], rank: RankFacts) -> int:
    """Return the same where values were seen to become subnormal: all before is shorter, and all after longer."""
    looks = rank.facts.get("subnormal") or []
    for last, one in itertools.pairwise(looks):
        if any((one.get(of) or 0.0) - (last.get(of) or 0.0) >= _NOTABLE for of in ("state", "parameters")):
            before = sum(1 for _, end in edges if end <= last["step"])
            after = medians[[begin >= one["step"] for begin, _ in edges]]
            if before and len(after) and after.min() >= LEAST_LONGER * medians[:before].max():
                return before
            # When it was between the two looks, the stretches say, which are alike before it.
            for split in range(sum(1 for _, end in edges if end <= one["step"]), before, -1):
                alike = medians[:split].max() <= LEAST_LONGER * medians[:split].min()
                if alike and len(after) and after.min() >= LEAST_LONGER * medians[:split].max():
                    return split
    return 0


def _uneven(phases: dict[str, NDArray[np.float64]], medians: NDArray[np.float64]) -> bool:
    """Return whether a phase stays about as long as it was: a slower machine slows all of them."""
    ratios = [ns[-1] / ns[0] for ns in phases.values() if ns[0] >= _PART * medians[0]]
    return bool(ratios) and min(ratios) <= 1 + (medians[-1] / medians[0] - 1) / 3


def _crowded(
    placed_samples: Maybe[Frame], steps: pd.DataFrame, stretches: list[NDArray[np.int64]], split: int, rise: float
) -> bool:
    """Return whether the longer steps wait for cores that other programs did not use before; `rise`: of their time.

    The stretch in which steps jump is in neither of the two times that are compared.
    """
    samples = placed_samples.or_none()
    if samples is None:
        return False
    begin = steps["start_ns"].to_numpy()
    end = begin + steps["dur_ns"].to_numpy()
    means = []
    for first, last in ((0, max(split - 1, 0)), (split + 1 if split else -1, -1)):
        try:
            values = held(samples, int(begin[stretches[first][0]]), int(end[stretches[last][-1]]))
        except NotMeasured:
            return False
        means.append(values.groupby(["source", "metric"])["value"].mean())
    more = means[1].sub(means[0]).to_dict()
    cores = more.get(("host", "cpu_cores"), np.nan) - more.get(("host", "job_cpu_cores"), np.nan)
    return bool(cores >= _CORES and more.get(("processes", WAITED), 0.0) >= _OF_RISE * rise)


def check(trends: Frame = needs(trends)) -> Estimate:
    if not len(trends):
        return nothing("the steps do not become longer while the job runs")
    return Estimate(
        gone_ns=by_rank(trends, "gone_ns"),
        noise_ns=float(trends["noise_ns"].max()),
        loses="is by what the steps grow while the job runs",
    )


def explain(
    estimate: Estimate,
    trends: Frame = needs(trends),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    memory_ends: Maybe[Frame] = maybe(memory_ends),
    job: Job = needs(JOB),
) -> Explanation:
    rank = estimate.worst
    row = estimate.rows(trends).to_dict("records")[0]
    of, share = _subnormal(job, rank, int(row["at_step"]))
    phase, first, last = str(row["phase"]), float(row["first_ns"]), float(row["last_ns"])
    doing = "worker" if phase == "fetch" and settings.training_loader(job, rank).get("num_workers") else phase
    line = costliest(costly_lines, rank, doing)
    of_optimizer = line_of(job, rank, "optimizer_step") if share and phase == "optimizer" else None
    held = memory_ends.or_none()
    memory = held is not None and bool((held["grows"] == 1).any())
    if row["kind"] == "grows":
        title = f"Steps grow from {duration(first)} to {duration(last)}"
        doubles = last / float(row["per_step_ns"])
        how = (
            f" by {duration(float(row['per_step_ns']))} with every step: in {doubles:,.0f} more steps they double again"
        )
    else:
        title = f"From step {int(row['at_step'])} on, steps take {digits(last / first)} × as long"
        how = f" from step {int(row['at_step'])} on: {duration(first)} before, {duration(last)} after"
    return Explanation(
        title=title,
        summary=f"In {count(int(row['steps']), 'steady step')} of rank {rank} the step becomes longer{how}."
        f" {percent(float(row['share']))} of the rise is {_WHERE[phase]}."
        + (" Memory grows with it." if memory else "")
        + (f" {percent(share)} of {of} became subnormal meanwhile, smaller than 1.2e-38." if share else ""),
        changes=_changes(row, line.advice("bound what it keeps from step to step, at") if line else "", bool(share)),
        evidence=table(f"How the step of rank {rank} changes", estimate.rows(trends), _COLUMNS),
        where=tuple(place for place in (of_optimizer, line.place if line else None) if place is not None),
        sure="Measured: the medians of ten stretches of the steady steps. The saving is all steps as long as the first"
        " ones; these have grown already, so that removing the cause may give more.",
        verdict=f"{title}.",
    )


_COLUMNS = {"phase": "mostly in", "first_ns": "the first ones_ns", "last_ns": "the last ones_ns"}
_COLUMNS |= {"per_step_ns": "longer with every step by_ns"}


def _subnormal(job: Job, rank: int, at_step: int) -> tuple[str, float]:
    """Return what became subnormal while steps became longer, and the share of it; 0: nothing that was seen."""
    looks = job.facts[rank].get("subnormal") or []
    for name, of in (("state", "the optimizer's state"), ("parameters", "the parameters")):
        before = max((one.get(name) or 0.0 for one in looks if one["step"] < at_step), default=0.0)
        after = max((one.get(name) or 0.0 for one in looks if one["step"] >= at_step), default=0.0)
        if after - before >= _NOTABLE:
            return of, after
    return "", 0.0


def _changes(row: dict[Any, Any], of_line: str, subnormal: bool) -> tuple[Change, ...]:
    """Propose what removes the growth: by the phase that it is in."""
    graph = change("detach what one step hands to the next: `hidden = hidden.detach()`, `total += loss.detach()`")
    denormal = change(
        "`torch.set_flush_denormal(True)` before training (on x86): numbers below 1e-38 are slow on a CPU, and become 0"
    )
    line = (change(of_line),) if of_line else ()
    if subnormal:
        return (denormal,)
    if row["phase"] == "backward" and row["kind"] == "grows":
        return (graph, *line)
    if row["phase"] in ("forward", "backward") and row["kind"] == "jumps":
        return (denormal, *line)
    return line or (change("find what a step appends to or keeps: sums and counts instead of all outputs"),)


RULE = Rule(
    "Steps that grow",
    check,
    explain,
    saves_from=("computation", "input_wait", "optimizer_host", "host", "launch_latency", "other"),
)
