"""How long each step took, what it was made of, and what held it up."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Job, Maybe, MeasureFailed
from dlprof.analysis.panel import MOST_RANKS, PHASES, Picture, points
from dlprof.analysis.step.run_clock import began_ns
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import count, duration

# Points of the parts of the steps: each the mean of as many steps as it takes.
MOST_POINTS = 300

# What is pointed at: stalls from this share of the mean step on, the longest of them.
LEAST_STALL = 0.1
MOST_STALLS = 40
MOST_EPOCHS = 40
MOST_RESUMED = 40
MOST_BARS = 60

Mark = tuple[float, str, str]


def draw(
    step_series: pd.DataFrame,
    step_times: Maybe[pd.Series[float]],
    first_times: Maybe[tuple[int, ...]],
    stalled_steps: Maybe[pd.DataFrame],
    job: Job,
) -> list[Panel]:
    """Draw the duration of each step, a line a rank, and what the steps were made of."""
    train = step_series[step_series["kind"] == "train"]
    if train["step"].nunique() < 2:
        raise NotMeasured("fewer than two steps")
    # A trace alone holds a few steps somewhere in the run.
    if train["profiled"].all():
        return [_durations(train, None, ())]
    at = step_times.get()
    return [_durations(train, at, _marks(first_times.get(), stalled_steps, job, step_series, at)), *_parts(train, at)]


def _durations(train: pd.DataFrame, at: pd.Series[float] | None, marks: tuple[Mark, ...]) -> Panel:
    table = train.drop_duplicates(["step", "rank"]).pivot(index="step", columns="rank", values="dur_ns")
    if table.shape[1] > MOST_RANKS:
        table = pd.DataFrame({"mean of ranks": table.mean(axis=1), "slowest rank": table.max(axis=1)})
    else:
        table.columns = pd.Index([f"rank {r}" for r in table.columns])
    slowed = train.groupby("step")["profiled"].max().astype(int) > 0
    note = ""
    if slowed.any() and not slowed.all():
        stretches = slowed.index.to_series().groupby((slowed != slowed.shift()).cumsum()).agg(["first", "last"])
        found = [(a, b) for a, b in stretches.itertuples(index=False, name=None) if slowed[a]]
        told = [f"{a}" if a == b else f"{a} to {b}" for a, b in found]
        note = f"{'Step' if told == [str(found[0][0])] else 'Steps'} {' and '.join(told)}: slowed by what was recorded."
    over = "step"
    steps: tuple[int, ...] = ()
    if at is not None:
        steps = tuple(int(str(n)) for n in table.index)
        over, table = "time_ns", table.set_axis(pd.Index(at[table.index]), axis=0)
    columns = (over, *map(str, table.columns))
    return Panel("lines", "Steps over the run", points(table), columns, unit="ns", note=note, marks=marks, steps=steps)


def _parts(train: pd.DataFrame, at: pd.Series[float]) -> list[Panel]:
    columns = [f"{phase}_ns" for phase in PHASES]
    known = train[(train[columns] >= 0).all(axis=1)]
    if known["step"].nunique() < 2:
        return []
    means = known.groupby("step")[["dur_ns", *columns]].mean()
    means["other"] = (means.pop("dur_ns") - means[columns].sum(axis=1)).clip(lower=0)
    together = np.arange(len(means)) // -(-len(means) // MOST_POINTS)
    first = at[means.index].groupby(together).first()
    steps = tuple(int(str(n)) for n in means.index.to_series().groupby(together).first())
    table = means.groupby(together).mean().set_axis(pd.Index(first), axis=0)
    size = int(np.bincount(together)[0])
    note = "The mean of the ranks" + (f" and of {size} steps a point." if size > 1 else ".")
    note += " Other is what lies between fetching, forward, backward and the optimizer."
    named = ("time_ns", *PHASES.values(), "other")
    title = "What the training thread did in its steps"
    return [Panel("areas", title, points(table), named, unit="ns", note=note, steps=steps)]


def _marks(
    first_times: tuple[int, ...],
    stalled_steps: Maybe[pd.DataFrame],
    job: Job,
    series: pd.DataFrame,
    at: pd.Series[float],
) -> tuple[Mark, ...]:
    """Point at what makes steps differ: epochs, validation, and what held them up, or kept the whole job still."""
    steps = series.drop_duplicates("step").set_index("step").sort_index()
    marks: list[Mark] = []
    epochs = steps.index[(steps["first"] != 0).to_numpy()]
    # One step ends an epoch, the next one begins another.
    epochs = epochs[np.diff(epochs, prepend=-2) > 1]
    if len(epochs) <= MOST_EPOCHS:
        marks += [(float(at[n]), f"step {n}: an epoch begins or ends", "epoch") for n in epochs]
    validates = (steps["kind"] == "validation").to_numpy()
    for _, stretch in steps[validates].groupby((~validates).cumsum()[validates]):
        n = int(stretch.index[0])
        length = duration(float(stretch["dur_ns"].sum()))
        marks.append((float(at[n]), f"step {n}: validation, {count(len(stretch), 'step')}, {length}", "validation"))
    began = began_ns(first_times, series["start_ns"].min())
    resumed = sorted({at - began for rank in job.run.ranks for at in rank.resumed_ns})[:MOST_RESUMED]
    marks += [(float(n), "the job went on after it was stopped", "suspended") for n in resumed if 0 < n < at.max()]
    with suppress(NotMeasured, MeasureFailed):
        stalls = stalled_steps.get().groupby(["kind", "step"], as_index=False)["ns"].max()
        stalls = stalls[(stalls["ns"] >= LEAST_STALL * steps["dur_ns"].mean()) & stalls["step"].isin(at.index)]
        for row in stalls.nlargest(MOST_STALLS, "ns").to_dict("records"):
            told = f"step {row['step']}: {str(row['kind']).replace('_', ' ')}, {duration(float(row['ns']))}"
            marks.append((float(at[row["step"]]), told, str(row["kind"])))
    return tuple(sorted(marks))


def stall_bars(steps: pd.DataFrame, rank: int, what: str) -> Panel:
    """Draw the longest of a rank's steps that stalls of one kind held up, rows of `stalled_steps`: a bar a step."""
    longest = steps.nlargest(MOST_BARS, "ns").sort_values("step")
    rows = tuple(
        (f"step {s}", float(ns), str(kind))
        for s, ns, kind in zip(longest["step"], longest["ns"], longest["kind"], strict=True)
    )
    title = f"{what} on rank {rank}, the {len(rows)} longest of its steps"
    return Panel("bars", title, rows, unit="ns")


PICTURE = Picture(draw)
