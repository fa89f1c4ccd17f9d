"""Where the whole job's time went: its steady steps, and all that the figures of the steady step leave out.

Validation, an epoch's first and last batch, warming up: none of it is in the mean steady step, and what it costs is no
saving of that step. It is set against what the whole training loop takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, across_ranks, maybe, needs, per_rank
from dlprof.analysis.machine.samples import sample_series
from dlprof.analysis.timeline.stalls import KINDS, Pattern, patterns
from dlprof.analysis.timeline.steady import light_steps, standard_error, steady_steps
from dlprof.analysis.timeline.steps import step_series
from dlprof.errors import NotMeasured

# A training step validates if so much of it is forward passes that no backward pass uses.
_MOSTLY = 0.5

_TRAINED = ("warmup", "steady", "traced", "epoch_ends", "stalled")
PARTS = ("setup", "first_batch", *_TRAINED[:-1], "validation", "other", "stalled", "suspended")


@per_rank
def last_step_ends(light_steps: Frame = needs(light_steps)) -> pd.DataFrame:
    """Return when the last step ended, ns of Unix time: end_ns, one row."""
    if not len(light_steps):
        raise NotMeasured("no step was recorded")
    return pd.DataFrame({"end_ns": [int(light_steps["start_ns"].iloc[-1] + light_steps["length_ns"].iloc[-1])]})


@per_rank
def whole_job(
    light_steps: Frame = needs(light_steps), stalls: Maybe[Frame] = maybe(schema.STALLS), rank: RankFacts = needs(RANK)
) -> pd.DataFrame:
    """Return one row for each part: part, steps, ns. The PARTS add up to the rank's time from importing torch on.

    setup: up to the first recorded step; first_batch: that step's wait for the loader; warmup: training steps before
    they have settled; traced: those slowed by the profiler; epoch_ends: training steps with an epoch's first batch or
    its end, where workers start and go, but for the job's very first step; other: neither trained nor evaluated;
    stalled: the few training steps in which it stood still; suspended: steps of any kind in which the job was stopped.
    KINDS of stalls follow, summed over all of these. Raises NotMeasured without a step log.
    """
    if not len(light_steps):
        return pd.DataFrame({"part": [], "steps": [], "ns": []}).astype({"part": "str"})
    steps, trains = light_steps, light_steps["kind"] == "train"
    is_part = {
        "suspended": steps["kind"] == "suspended",
        "stalled": steps["kind"] == "stalled",
        "traced": steps["profiled"] != 0,
        "validation": steps["kind"] == "validation",
        "other": ~trains,
        "epoch_ends": (steps["first"] != 0) & (trains.cumsum() > 1) & ~steps["steady"],
        "steady": steps["steady"],
    }
    part = np.select(list(is_part.values()), list(is_part), "warmup")
    dur = steps["length_ns"].to_numpy()
    waited = max(float(steps["fetch_ns"].iloc[0]), 0.0) if part[0] == "warmup" else 0.0
    dur = dur.astype(float)
    dur[0] -= waited
    rows = [(p, int((part == p).sum()), float(dur[part == p].sum())) for p in PARTS if (part == p).any()]
    if waited:
        rows.insert(0, ("first_batch", 0, waited))
    began = (rank.facts.get("clock") or {}).get("unix_ns")
    if isinstance(began, int) and began < light_steps["start_ns"].iloc[0]:
        rows.insert(0, ("setup", 0, float(light_steps["start_ns"].iloc[0] - began)))
    if stalls:
        held = stalls.get().astype({"kind": "str"}).groupby("kind")[["count", "dur_ns"]].sum()
        rows += [(k, int(held["count"][k]), float(held["dur_ns"][k])) for k in KINDS if k in held.index]
    return pd.DataFrame(rows, columns=["part", "steps", "ns"])


@across_ranks
def run_parts(
    whole_job: Frame = needs(whole_job), last_step_ends: Frame = needs(last_step_ends), job: Job = needs(JOB)
) -> pd.DataFrame:
    """Return the parts of the whole run in the order of time, as the mean over the ranks: part, steps, ns, share.

    most_ns, most_rank: what the part took on the rank on which it took longest, and that rank; −1: not known by rank.
    The PARTS of `whole_job`; before them launch, from the command's start until PyTorch was imported, and after them
    end, from the last step on. Raises NotMeasured where the run's beginning and end were not recorded.
    """
    start, end = job.run.start_ns, job.run.end_ns
    if start is None or end is None:
        raise NotMeasured("the run's beginning and end were not recorded")
    ranks = whole_job["rank"].nunique()
    sums = whole_job.groupby("part")[["steps", "ns"]].sum() / ranks
    parts = sums.reindex(list(PARTS)).fillna(0.0)
    last = float(last_step_ends["end_ns"].mean())
    parts.loc["end"] = [0.0, end - last]
    left = (end - start) - parts["ns"].sum()
    if left < 0 or end < last:
        raise NotMeasured("the clocks of the command and of its ranks differ")
    parts = pd.concat([pd.DataFrame({"steps": 0.0, "ns": left}, index=["launch"]), parts])
    parts = parts[parts["ns"] > 0].rename_axis("part").reset_index()
    by_rank = whole_job.pivot_table(index="part", columns="rank", values="ns").fillna(0.0).reindex(parts["part"])
    most, rank = by_rank.max(axis=1).to_numpy(), by_rank.fillna(0.0).idxmax(axis=1).to_numpy()
    # What was before PyTorch and after the last step is known of the whole run alone.
    return parts.assign(
        share=parts["ns"] / parts["ns"].sum(),
        most_ns=np.where(np.isnan(most), parts["ns"], most),
        most_rank=np.where(np.isnan(most), -1, rank),
    )


@across_ranks
def training_steps(whole_job: Frame = needs(whole_job)) -> pd.Series[float]:
    """Count each rank's training steps, in whatever part of the job; by rank."""
    trained = whole_job["part"].isin(_TRAINED)
    return whole_job[trained].groupby("rank")["steps"].sum()


@across_ranks
def loop_step_ns(
    whole_job: Frame = needs(whole_job), training_steps: pd.Series[float] = needs(training_steps)
) -> float:
    """Return what the training loop takes for each training step with all that lies between them: the ranks' mean, ns.

    As in a job that runs for long: steps that warm up or are traced count as steady ones, and setting up not at all.
    Raises NotMeasured where no steady step was recorded.
    """
    tables = (whole_job.pivot_table(index="rank", columns="part", values=c) for c in ("steps", "ns"))
    steps, ns = (t.reindex(columns=list(PARTS)).fillna(0.0) for t in tables)
    if not len(steps) or not (steps["steady"] > 0).all():
        raise NotMeasured("no steady training step was recorded")
    plain = steps["steady"] + steps["warmup"] + steps["traced"] + steps["stalled"]
    between = ns["epoch_ends"] + ns["validation"] + ns["other"]
    loop = plain * ns["steady"] / steps["steady"] + between
    return float((loop / training_steps).mean())


@across_ranks
def run_step_ns(run_parts: Frame = needs(run_parts), training_steps: pd.Series[float] = needs(training_steps)) -> float:
    """Return what the whole run takes for each training step, ns."""
    return float(run_parts["ns"].sum() / training_steps.mean())


@per_rank
def validation(light_steps: Frame = needs(light_steps)) -> pd.DataFrame:
    """Return one row of the phases of validation: validation steps with no training step between them.

    Columns: phases, steps (of validation), every (training steps between the starts of two phases, the median; NaN: of
    one phase it is not known), phase_ns (the mean phase) and its standard error noise_ns, fetch_share (of it, waiting
    in the loader), forward_share (in forward passes), fetches (batches a phase), inside (training steps that are mostly
    forward passes which no backward pass uses: validation without a loader). Raises NotMeasured where the step log was
    not recorded.
    """
    trains = light_steps["kind"] == "train"
    steps = light_steps[light_steps["kind"] != "suspended"]
    validates = (steps["kind"] == "validation").to_numpy()
    begins = validates & ~np.append(False, validates[:-1])
    trained = (steps["kind"] == "train").cumsum().to_numpy()
    mine = steps[validates]
    took = mine.groupby(np.cumsum(begins)[validates])["length_ns"].sum().to_numpy(dtype=float)
    total, phases = float(mine["dur_ns"].sum()), max(len(took), 1)
    row = {
        "phases": len(took),
        "steps": len(mine),
        "every": float(np.median(np.diff(trained[begins]))) if len(took) > 1 else np.nan,
        "phase_ns": float(took.sum()) / phases,
        "noise_ns": standard_error(took),
        "fetch_share": float(mine["fetch_ns"].clip(lower=0).sum()) / total if total else 0.0,
        "forward_share": float(mine["forward_ns"].clip(lower=0).sum()) / total if total else 0.0,
        "fetches": float(mine["fetches"].clip(lower=0).sum()) / phases,
        "inside": int((trains & (light_steps["unused_forward_ns"] > light_steps["dur_ns"] * _MOSTLY)).sum()),
    }
    return pd.DataFrame([row])


@per_rank
def trained_on(
    light_steps: Frame = needs(light_steps), loading: Frame = needs(schema.LOADING), rank: RankFacts = needs(RANK)
) -> pd.DataFrame:
    """Return one row: how much of the time of validation goes to batches of what is trained on, ns; their number.

    Columns: again_ns, batches (of all phases). Such batches come from a loader that gives batches of training steps, or
    from one over the same data set, where both go through all of it. Raises NotMeasured without a record of batches.
    """
    given = loading[loading["kind"].isin(("first", "batch")) & (loading["count"] == 1) & (loading["loader"] >= 0)]
    loaders = given.drop_duplicates("step", keep="last").set_index("step")["loader"]
    steps = light_steps.assign(loader=loaders.reindex(light_steps["step"]).to_numpy())
    trains = set(steps.loc[steps["kind"] == "train", "loader"].dropna().astype(int))
    known = rank.facts.get("loaders") or []
    whole = [n for n, one in enumerate(known) if one.get("shuffle") in (True, False)]  # no sampler that takes a part
    trains |= {n for n in whole if any(_data_of(known, n) == _data_of(known, m) for m in trains if m in whole)}
    again = steps[(steps["kind"] == "validation") & steps["loader"].isin(trains)]
    return pd.DataFrame([{"again_ns": float(again["length_ns"].sum()), "batches": len(again)}])


def _data_of(loaders: Sequence[Mapping[str, Any]], place: int) -> int:
    """Return the place of the first loader that reads what this one does."""
    found = loaders[place].get("data_of") if place < len(loaders) else None
    return place if found is None else int(found)


@per_rank
def unused_forward(
    steady_steps: Frame = needs(steady_steps), patterns: Maybe[tuple[Pattern, ...]] = maybe(patterns)
) -> pd.DataFrame:
    """Return one row: the time and number of forward passes of a steady step that no backward pass uses.

    Columns: ns and its standard error noise_ns, share (of the time in forward passes), forwards (of a step), backwards.
    Steps with periodic extra work are left out. Raises NotMeasured where it was not recorded.
    """
    between = [n for one in patterns.or_none() or () if not one.trains for n in one.steps]
    steps = steady_steps[~steady_steps["step"].isin(between)]
    unused = steps["unused_forward_ns"].to_numpy(dtype=float)
    if not len(steps) or (unused < 0).any():
        raise NotMeasured("which forward passes a backward pass uses was not recorded, or no steady step was")
    # In most steps: work in only a few of them is not part of each.
    ns = float(unused.mean()) if np.median(unused) > 0 else 0.0
    row = {
        "ns": ns,
        "noise_ns": standard_error(unused),
        "share": ns / max(float(steps["forward_ns"].mean()), 1.0),
        "forwards": float(steps["forwards"].median()),
        "backwards": float(steps["backwards"].median()),
    }
    return pd.DataFrame([row])


@across_ranks
def validation_cost(
    validation: Frame = needs(validation),
    training_steps: pd.Series[float] = needs(training_steps),
    trained_on: Maybe[Frame] = maybe(trained_on),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Return `validation` with what a rank's validation takes for each training step: cost_ns, its error cost_noise_ns.

    `again` is the share of it that goes to what is trained on, 0 where that is not known. `among`: over how many ranks
    it could be shared out that it is not (1: it is, or that is not known). `samples`: how many of them each rank goes
    through all by itself; 0: not known, or one rank validates while others wait.
    """
    steps = training_steps.reindex(validation["rank"]).to_numpy()
    frame = validation.assign(
        cost_ns=validation["phases"] * validation["phase_ns"] / steps,
        cost_noise_ns=validation["phases"] * validation["noise_ns"] / steps,
        again=0.0,
        among=1,
        samples=0,
    )
    if (scored := trained_on.or_none()) is not None:
        again = scored.set_index("rank")["again_ns"].reindex(frame["rank"]).fillna(0.0).to_numpy()
        total = (frame["phases"] * frame["phase_ns"]).to_numpy(dtype=float)
        frame["again"] = np.minimum(again / np.maximum(total, 1.0), 1.0)
    world = job.world_size
    if world == len(job.ranks) > 1 and (frame["phases"] > 0).sum() == 1:
        return frame.assign(among=world)
    loader = validation_loader(job, int(frame["rank"].to_numpy()[frame["phases"].argmax()]))
    size, samples = loader.get("batch_size"), loader.get("dataset_length")
    if world > 1 and size and samples:
        all_of_it = frame["fetches"] >= samples // size
        frame = frame.assign(among=np.where(all_of_it, world, 1), samples=np.where(all_of_it, samples, 0))
    return frame


def validation_loader(job: Job, rank: int) -> dict[str, Any]:
    """Return the settings of a rank's validation loader; empty where none was seen."""
    loaders = job.facts[rank].get("loaders") or []
    return next((dict(x) for x in loaders if x.get("role") == "validation"), {})


# Clocks that lie so far apart have nothing to do with each other: a log next to somebody else's traces.
_ANOTHER_CLOCK_NS = 7 * 86_400 * 10**9


@across_ranks
def first_times(
    step_series: Maybe[Frame] = maybe(step_series), sample_series: Maybe[Frame] = maybe(sample_series)
) -> tuple[int, ...]:
    """Return when the first step and the first sample were, as far as there are any, in ns of Unix time."""
    known = ((step_series.or_none(), "start_ns"), (sample_series.or_none(), "at_ns"))
    return tuple(int(frame[column].min()) for frame, column in known if frame is not None)


def began_ns(first_times: tuple[int, ...], own: float) -> int:
    """Return what a picture over the run counts from: when the first thing that is drawn over time was.

    `own` is when what the picture shows began; where all the rest lies a week away, it counts from there.
    """
    return min(at for at in (int(own), *first_times) if abs(at - own) < _ANOTHER_CLOCK_NS)


@across_ranks
def step_times(
    step_series: Frame = needs(step_series), first_times: tuple[int, ...] = needs(first_times)
) -> pd.Series[float]:
    """Return when each step began on the first rank that did, in ns from the run's beginning, by its number."""
    starts = step_series.groupby("step")["start_ns"].min()
    return starts - began_ns(first_times, step_series["start_ns"].min())
