"""What a step would be without something: the ranks' own time replayed.

A step ends for all ranks when the slowest has done its own work; the others wait for it in collectives. So the own time
of a rank is the step less its waiting for others, and taking work from one rank shortens the step only as far as no
other rank then is the slowest: saving = max(own) − max(own − removed).

How well the mean steady step of a rank is known: how steps vary, whether the traced ones are like the others, and why
steps were traced again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import waits
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, across_ranks, maybe, needs, per_rank
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.timeline.device import has_device
from dlprof.analysis.timeline.stalls import KINDS, stall_means, stalled_steps
from dlprof.analysis.timeline.steady import ENOUGH, STRETCHES, light_steps, standard_error, stretch_means, widened
from dlprof.analysis.timeline.steps import PHASES, Timing, TracedSteps, step_means, timing, trace_window
from dlprof.errors import NotMeasured
from dlprof.result import MOST_LENGTHS, QUANTILES
from dlprof.units import digits, duration, listed


@across_ranks
def own_time(
    step_means: Frame = needs(step_means),
    waits: Maybe[Frame] = maybe(waits),
    breakdown: Maybe[Frame] = maybe(breakdown),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Split the mean steady step into each rank's own time and its waiting for others.

    Columns: rank, step_ns, wait_ns, own_ns, known, traced (steps of it were). Ranks that wait for each other have one
    step, the mean of theirs (a rank whose trace began earlier shows a longer one). Where waiting is not known (`known`
    is False) all of a rank's own step counts as own, but for the bubble of its pipeline, in which it waits for its
    neighbours: that is in neither of the two. On a CPU the waiting of the traced steps is brought to the mean steady
    step in the proportion of the two's exposed communication; on devices, what is not the traced steps' transfer is
    waiting.
    """
    means = step_means.set_index("rank")
    step, traced = means["step_ns"], means["traced_steps"] > 0
    wait, bubble, known = 0.0 * step, 0.0 * step, False
    with suppress(NotMeasured):
        parts = pd.DataFrame({c: part(breakdown.get(), c) for c in ("communication", "pipeline_bubble")})
        communication, bubble = (parts[c].reindex(step.index, fill_value=0.0) for c in parts)
        waited = waits.get().groupby("rank")[["wait_ns", "exposed_ns"]].mean().reindex(step.index, fill_value=0.0)
        if settings.on_cpu(job):
            wait = communication * (waited["wait_ns"] / waited["exposed_ns"].replace(0, np.nan)).fillna(0.0)
        else:
            # A device transfers as fast in any step: by what the others communicate for longer, they wait for longer.
            wait = (communication - (waited["exposed_ns"] - waited["wait_ns"]).clip(lower=0.0)).clip(lower=0.0)
        step, known = 0.0 * step + step.mean(), True
    own = (step - wait - bubble).clip(lower=0.0)
    frame = pd.DataFrame({"step_ns": step, "wait_ns": wait, "own_ns": own, "known": known, "traced": traced})
    return frame.reset_index()


def saving(own_time: pd.DataFrame, removed: Mapping[int, float] | pd.Series[float]) -> float:
    """Return how much shorter the mean steady step would be, ns, with so much removed from each rank's own time.

    Where some ranks were traced and others not, nothing is known of what would be removed from these: they are taken to
    be like those.
    """
    times = own_time.set_index("rank")
    less = pd.Series(removed, dtype=float).reindex(times.index).clip(lower=0.0)
    known = less.notna() | times["traced"] | (not times["traced"].any())
    own, less = times["own_ns"][known], less[known].fillna(0.0)
    return max(0.0, float(own.max() - (own - less).clip(lower=0.0).max()))


def saving_in_pipelines(
    own_time: pd.DataFrame, removed: Mapping[int, float], pipelines: pd.DataFrame | None, breakdown: pd.DataFrame
) -> float:
    """Return the same where the ranks are stages of pipelines (None: of none).

    A delay of one stage delays its neighbours, and counts there as their bubble: without it, the bubble is shorter too.
    """
    if pipelines is None:
        return saving(own_time, removed)
    bubble = part(breakdown, "pipeline_bubble")
    own = own_time.set_index("rank")["own_ns"]
    idle, less = (pd.Series(of, dtype=float).reindex(own.index) for of in (bubble, removed))
    of_pipeline = less.groupby(pipelines.drop_duplicates("rank").set_index("rank")["ranks"].reindex(own.index))
    # Ranks with neither value stay unknown.
    most = pd.Series(np.fmax(less, np.minimum(of_pipeline.transform("max"), idle)), own.index)
    return saving(own_time.assign(own_ns=(own + idle.fillna(0.0)).to_numpy()), most)


def saving_input(step_series: pd.DataFrame, own_time: pd.DataFrame, removed: Mapping[int, float]) -> float:
    """Return the same for the wait for data, step by step: ranks that starve in turn cost more than their means.

    In every recorded steady step the rank that has the longest own time, its wait of that step included, sets the pace.
    `removed` is each rank's mean wait, ns; the series shows only how it spreads over the steps.
    """
    series = step_series[step_series["steady"].astype(bool)]
    fetch = series.pivot_table(index="step", columns="rank", values="fetch_ns", aggfunc="first").dropna()
    if len(fetch) < 2 or set(fetch.columns) != set(own_time["rank"]):
        return saving(own_time, removed)
    waits = fetch * (_of_ranks(removed, fetch.columns) / fetch.mean().replace(0, np.nan)).fillna(0.0)
    return _saving_of_steps(own_time, waits, waits.mean(), len(waits))


@across_ranks
def stall_savings(
    breakdown: Frame = needs(breakdown),
    stall_means: Frame = needs(stall_means),
    stalled_steps: Frame = needs(stalled_steps),
    own_time: Frame = needs(own_time),
) -> dict[str, float]:
    """Return the same for each kind of stall: kind → ns.

    In a step that stalls, the rank that has the longest own time, its stall of that step included, sets the pace; a
    rank that stalls not, or less, waits for it.
    """
    steps, savings = float(stall_means["steps"].mean()), {}
    for kind in KINDS:
        stalls = stalled_steps[stalled_steps["kind"] == kind].pivot_table("ns", "step", "rank", aggfunc="sum")
        stalls = stalls.reindex(columns=own_time["rank"]).fillna(0.0)
        felt = _of_ranks(part(breakdown, kind), stalls.columns)
        # Where device work hides a part of the stalls, each counts by as much less.
        share = (felt * steps / stalls.sum().replace(0, np.nan)).fillna(0.0).clip(upper=1.0)
        savings[kind] = _saving_of_steps(own_time, stalls * share, felt, steps)
    return savings


def _of_ranks(removed: Mapping[int, float], ranks: pd.Index) -> pd.Series[float]:
    return pd.Series(removed, dtype=float).reindex(ranks).fillna(0.0)


def _saving_of_steps(own_time: pd.DataFrame, lost: pd.DataFrame, means: pd.Series[float], steps: float) -> float:
    """Return what the job saves where `lost`, ns by step and rank, is gone from so many steps, ns of the mean one.

    `means` is what the own time of each rank has of it. Where waiting for other ranks is not known, the ranks are taken
    to have the same work otherwise.
    """
    times = own_time.set_index("rank").reindex(lost.columns)
    rest = times["own_ns"] - means
    if not times["known"].all():
        rest[:] = rest.min()
    return max(0.0, float(((lost + rest).max(axis=1) - rest.max()).sum() / steps))


# The steps before and after the traced ones are divided into stretches: the fewer of them into so many.
_PARTS = 4

# A figure must differ from zero by so many standard errors: a chance difference is not a finding.
LEAST_NOISE = 2.0


@per_rank
def spread(timing: Timing = needs(timing)) -> pd.DataFrame:
    """Return one row: steps, step_ns (their mean), noise_ns, its standard error (NaN: of a single step), and quantiles.

    noise_ns is the larger one of what the single steps show and what the means of consecutive stretches show. The
    QUANTILES of the steps are q0, q1, ... in ns.
    """
    noise = timing.noise_ns if timing.steps > 1 else np.nan
    if timing.steps >= 2 * STRETCHES:
        noise = max(noise, standard_error(stretch_means(timing.even)))
    quantiles = {f"q{i}": float(q) for i, q in enumerate(np.quantile(timing.lengths, QUANTILES))}
    return pd.DataFrame([{"steps": timing.steps, "step_ns": timing.step_ns, "noise_ns": noise, **quantiles}])


@per_rank
def step_lengths(timing: Timing = needs(timing)) -> pd.DataFrame:
    """Return steady steps in their order: place, length_ns. Of many, MOST_LENGTHS are drawn, the same on all ranks."""
    place = np.arange(timing.steps, dtype=np.uint64)
    # By a hash of the place: steps that are periodically longer are neither all drawn nor all left out.
    drawn = np.sort(np.argsort(place * np.uint64(2_654_435_761) % np.uint64(2**32))[:MOST_LENGTHS])
    return pd.DataFrame({"place": drawn, "length_ns": timing.lengths[drawn].astype(float)})


@across_ranks
def lengths_ns(step_lengths: Frame = needs(step_lengths)) -> tuple[float, ...]:
    """Return the lengths of the steps that all ranks have, the mean over the ranks, in ns."""
    by = step_lengths.groupby("place")["length_ns"].agg(["mean", "size"])
    return tuple(by.loc[by["size"] == step_lengths["rank"].nunique(), "mean"].round().tolist())


@per_rank
def window_likeness(
    has_device: bool = needs(has_device),
    timing: Maybe[Timing] = maybe(timing),
    trace_window: TracedSteps = needs(trace_window),
    light_steps: Maybe[Frame] = maybe(light_steps),
) -> pd.DataFrame:
    """Return one row of a rank with a device: ratio, after, after_noise, longer, linked, left_out.

    ratio: mean traced ÷ mean untraced step. after: the usual untraced step after the traced ones ÷ before them, with
    its standard error after_noise; longer: the phase in which most of the difference lies, "": none has half of it.
    linked: the share of the device's work whose launch the trace holds. left_out: why traced steps are left out, with
    their numbers. NaN: not known. No row without a device.
    """
    if not has_device:
        columns = ["ratio", "after", "after_noise", "longer", "linked", "left_out"]
        return pd.DataFrame(columns=columns, dtype=float)
    overhead = timing.get().overhead
    after, noise, longer = _after(light_steps.get()) if light_steps else (np.nan, np.nan, "")
    row = {
        "ratio": np.nan if overhead is None else overhead,
        "after": after,
        "after_noise": noise,
        "longer": longer,
        "linked": trace_window.linked,
        "left_out": "; ".join(timing.get().left),
    }
    return pd.DataFrame([row])


def _after(light_steps: pd.DataFrame) -> tuple[float, float, str]:
    """Return how long steps are after the profiled ones, as a multiple of those before, its standard error, and where.

    Stretches of steps are compared that are as long before as after, by their medians: a pause now and then is no sign
    of the profiler, and a machine that is slower for some steps in a row is so without one. How far stretches on the
    same side are apart is the noise; NaN: there is but one on each.
    """
    profiled = np.flatnonzero(light_steps["profiled"])
    if not len(profiled):
        return np.nan, np.nan, ""
    halves = [half[half["steady"]] for half in (light_steps[: profiled[0]], light_steps[profiled[-1] + 1 :])]
    if min(map(len, halves)) < ENOUGH:
        return np.nan, np.nan, ""
    lengths = [half["length_ns"].to_numpy() for half in halves]
    each = max(ENOUGH, min(map(len, lengths)) // _PARTS)
    medians = [np.array([np.median(part) for part in np.array_split(of, len(of) // each)]) for of in lengths]
    before, after = (float(of.mean()) for of in medians)
    freedom = sum(map(len, medians)) - 2
    scatter = math.sqrt(sum(float(of.var()) * len(of) for of in medians) / freedom) if freedom else np.nan
    noise = widened(max(freedom, 1)) * scatter * math.hypot(*(len(of) ** -0.5 for of in medians)) / before
    first, then = (half[["dur_ns", *(f"{p}_ns" for p in PHASES)]].mean() for half in halves)
    longer = then - first
    most = str(longer.iloc[1:].idxmax())
    return after / before, noise, most.removesuffix("_ns") if longer[most] > longer["dur_ns"] / 2 > 0 else ""


# So many steady steps next to a window are compared, and at least so many: means of fewer are of single steps.
_NEAR, _FEWEST = 20, 10

# From this ratio on steps are called slower, as in a rank; in healthy jobs on shared machines it is up to 1.2.
_SLOWER = 1.25

# What stands before a later window: its warm-up.
_WARMUP = 4

_GREW = {
    "fetch": "the loader's wait",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer's step",
    "rest": "what the script does between these",
}

_COLUMNS = ["number", "first", "last", "slower", "ratio", "phase", "before_ns", "after_ns"]


@per_rank
def later_windows(light_steps: Frame = needs(light_steps), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return one row for each later trace window of a rank, none where it had one window or its steps are too few.

    Columns: number, first and last (its steps), slower (1: it opened by itself), ratio (the mean steady step next to
    it ÷ the one next to the first window, or at the job's start without one), phase (that grew most), before_ns and
    after_ns (this phase's mean at both).
    """
    traced = [w for w in rank.facts.get("windows") or () if w.get("trace") and w.get("first_step") is not None]
    rows = [row for window in traced if (row := _row(light_steps, window)) is not None]
    return pd.DataFrame(rows, columns=_COLUMNS)


def _row(steps: pd.DataFrame, window: Mapping[str, Any]) -> list[Any] | None:
    first, last = window["first_step"], window.get("last_step") or window["first_step"]
    steady, profiled = steps[steps["steady"]], steps.loc[steps["profiled"] != 0, "step"]
    begins = profiled.min() if len(profiled) and profiled.min() < first - _WARMUP else steady["step"].min()
    middle = (begins + first) / 2
    before = _next_to(steady[steady["step"] < middle], begins, begins)
    after = _next_to(steady[steady["step"] >= middle], first, last)
    if min(len(before), len(after)) < _FEWEST:
        return None
    then, now = _means(before), _means(after)
    phase = str((now - then).drop("dur").idxmax())
    number, slower = window.get("number") or 0, int(window.get("why") == "slower")
    return [number, first, last, slower, now["dur"] / then["dur"], phase, then[phase], now[phase]]


def _next_to(steady: pd.DataFrame, first: float, last: float) -> pd.DataFrame:
    """Return the steps that are next to a window."""
    number = steady["step"].to_numpy()
    away = np.where(number < first, first - number, number - last)
    return steady.iloc[np.argsort(away, kind="stable")[:_NEAR]]


def _means(steps: pd.DataFrame) -> pd.Series[float]:
    """Return the mean duration and that of each phase, in ns."""
    means = {"dur": steps["dur_ns"].mean()} | {p: steps[f"{p}_ns"].clip(lower=0).mean() for p in PHASES}
    means["rest"] = means["dur"] - sum(means[p] for p in PHASES)
    return pd.Series(means)


def traced_again(windows: pd.DataFrame, read: int) -> str:
    """Say which steps were traced again, why, and what had become slower; `read`: the window of this report."""
    mine = windows[windows["rank"] == windows["rank"].min()]
    row = mine.iloc[int(mine["ratio"].to_numpy().argmax())]
    ratio, others = float(row["ratio"]), [n for n in mine["number"].tolist() if n != read]
    steps = f"steps {int(row['first']):,} to {int(row['last']):,} were traced again"
    grew = f"{_GREW[str(row['phase'])]} grew from {duration(row['before_ns'])} to {duration(row['after_ns'])}"
    if row["slower"] and ratio <= 1:
        why = " because they took longer for a while"
    elif row["slower"]:
        why = f" because they took {digits(ratio)} × as long as before: {grew}"
    elif ratio >= _SLOWER:
        why = f", as asked: they took {digits(ratio)} × as long as before: {grew}"
    else:
        why = ", as asked: steps were about as long as before"
    if not others:
        return f"{steps}{why}"
    return (
        f"{steps}{why} (`dlprof report RUN --window {others[0]}` reads {'it' if len(others) == 1 else listed(others)})"
    )
