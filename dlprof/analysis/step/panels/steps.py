"""How long each step took, what it was made of, and what held it up."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.panel import MOST_RANKS, PHASES, Picture, points
from dlprof.analysis.step.run_clock import began_ns, first_times, step_times
from dlprof.analysis.timeline.stalls import stalled_steps
from dlprof.analysis.timeline.steps import step_series
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import count, duration

# Points of the parts of the steps: each the mean of as many steps as it takes.
MOST_POINTS = 300

# What is marked, of each kind so many: stalls from this share of the mean step on, the longest of them.
LEAST_STALL = 0.1
MOST_MARKS = 40
MOST_BARS = 60

Mark = tuple[float, str, str]


def draw(
    step_series: Frame = needs(step_series),
    step_times: Maybe[pd.Series[float]] = maybe(step_times),
    first_times: Maybe[tuple[int, ...]] = maybe(first_times),
    stalled_steps: Maybe[Frame] = maybe(stalled_steps),
    job: Job = needs(JOB),
) -> list[Panel]:
    """Draw the duration of each step, a line a rank, and what the steps were made of."""
    train = step_series[step_series["kind"] == "train"]
    if train["step"].nunique() < 2:
        raise NotMeasured("fewer than two steps")
    # A trace alone holds a few steps somewhere in the run.
    if train["profiled"].all():
        return [_durations(train, None, ())]
    at = step_times.get()
    began = began_ns(first_times.get(), step_series["start_ns"].min())
    resumed = sorted({at - began for rank in job.run.ranks for at in rank.resumed_ns})[:MOST_MARKS]
    marks = _marks(step_series, at) + _stall_marks(stalled_steps.or_none(), at, step_series)
    marks += [(float(n), "the job went on after it was stopped", "suspended") for n in resumed if 0 < n < at.max()]
    return [_durations(train, at, tuple(sorted(marks))), *_parts(train, at)]


def _durations(train: pd.DataFrame, at: pd.Series[float] | None, marks: tuple[Mark, ...]) -> Panel:
    table = train.drop_duplicates(["step", "rank"]).pivot(index="step", columns="rank", values="dur_ns")
    if table.shape[1] > MOST_RANKS:
        table = pd.DataFrame({"mean of ranks": table.mean(axis=1), "slowest rank": table.max(axis=1)})
    else:
        table.columns = pd.Index([f"rank {r}" for r in table.columns])
    slowed, note = train.groupby("step")["profiled"].max() > 0, ""
    if slowed.any() and not slowed.all():
        stretches = [(run.index[0], run.index[-1]) for run in _stretches(slowed)]
        named = " and ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in stretches)
        note = f"Step{'s' if slowed.sum() > 1 else ''} {named}: traced or counted, which takes longer."
    over, steps = "step", ()
    if at is not None:
        over, steps = "time_ns", tuple(table.index.tolist())
        table = table.set_axis(pd.Index(at[table.index]), axis=0)
    columns = (over, *map(str, table.columns))
    return Panel("lines", "Steps over the run", points(table), columns, unit="ns", note=note, marks=marks, steps=steps)


def _stretches(chosen: pd.Series[bool]) -> list[pd.Series[bool]]:
    """Split the chosen ones into those that follow each other."""
    return [run for _, run in chosen[chosen].groupby((~chosen).cumsum()[chosen])]


def _parts(train: pd.DataFrame, at: pd.Series[float]) -> list[Panel]:
    columns = [f"{phase}_ns" for phase in PHASES]
    known = train[(train[columns] >= 0).all(axis=1)]
    if known["step"].nunique() < 2:
        return []
    means = known.groupby("step")[["dur_ns", *columns]].mean()
    means["other"] = (means.pop("dur_ns") - means[columns].sum(axis=1)).clip(lower=0)
    size = -(-len(means) // MOST_POINTS)
    table = means.groupby(np.arange(len(means)) // size).mean()
    steps = means.index[::size]
    note = "The mean of the ranks" + (f" and of {size} steps a point." if size > 1 else ".")
    note += " Other is what lies between fetching, forward, backward and the optimizer."
    named = ("time_ns", *PHASES.values(), "other")
    title, rows = "What the training thread did in its steps", points(table.set_axis(pd.Index(at[steps]), axis=0))
    return [Panel("areas", title, rows, named, unit="ns", note=note, steps=tuple(steps.tolist()))]


def _marks(series: pd.DataFrame, at: pd.Series[float]) -> list[Mark]:
    """Mark epochs and validation, which make steps differ."""
    steps = series.drop_duplicates("step").set_index("step").sort_index()
    epochs = steps.index[steps["first"] != 0]
    # One step ends an epoch, the next one begins another.
    epochs = epochs[np.diff(epochs, prepend=-2) > 1]
    marks = [(float(at[n]), f"step {n}: an epoch begins or ends", "epoch") for n in epochs]
    marks = marks if len(marks) <= MOST_MARKS else []
    for stretch in _stretches(steps["kind"] == "validation"):
        n, length = stretch.index[0], duration(float(steps["dur_ns"][stretch.index].sum()))
        marks.append((float(at[n]), f"step {n}: validation, {count(len(stretch), 'step')}, {length}", "validation"))
    return marks


def _stall_marks(stalled_steps: pd.DataFrame | None, at: pd.Series[float], series: pd.DataFrame) -> list[Mark]:
    """Mark the longest stalls, where they were recorded."""
    if stalled_steps is None:
        return []
    stalls = stalled_steps.groupby(["kind", "step"], as_index=False)["ns"].max()
    least = LEAST_STALL * series.drop_duplicates("step")["dur_ns"].mean()
    longest = stalls[(stalls["ns"] >= least) & stalls["step"].isin(at.index)].nlargest(MOST_MARKS, "ns")
    return [
        (float(at[step]), f"step {step}: {kind.replace('_', ' ')}, {duration(float(ns))}", kind)
        for kind, step, ns in longest.itertuples(index=False)
    ]


def stall_bars(steps: pd.DataFrame, rank: int, what: str) -> Panel:
    """Draw the longest of a rank's steps that stalls of one kind held up, rows of `stalled_steps`: a bar a step."""
    longest = steps.nlargest(MOST_BARS, "ns").sort_values("step")
    bars = zip(longest["step"], longest["ns"], longest["kind"], strict=True)
    rows = tuple((f"step {step}", float(ns), str(kind)) for step, ns, kind in bars)
    return Panel("bars", f"{what} on rank {rank}, the {len(rows)} longest of its steps", rows, unit="ns")


PICTURE = Picture(draw)
