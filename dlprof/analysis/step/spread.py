"""How well the mean steady step of a rank is known: how steps vary, and whether the traced ones are like the others."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, across_ranks, maybe, needs, per_rank
from dlprof.analysis.timeline.device import has_device
from dlprof.analysis.timeline.steady import ENOUGH, STRETCHES, light_steps, standard_error, stretch_means, widened
from dlprof.analysis.timeline.steps import PHASES, Timing, timing
from dlprof.analysis.timeline.traced import TracedSteps, trace_window
from dlprof.result import MOST_LENGTHS, QUANTILES

# The steps before and after the traced ones are divided into stretches: the fewer of them into so many.
_PARTS = 4

# So many standard errors a figure must be away from nothing: what comes and goes by chance is no finding.
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
    """Return one row of a rank with a device: ratio, after, after_noise, longer, linked, left_out, without_work.

    ratio: mean traced ÷ mean untraced step. after: the usual untraced step after the traced ones ÷ before them, with
    its standard error after_noise; longer: the phase in which most of the difference lies, "": none has half of it.
    linked: the share of the device's work whose launch the trace holds. left_out: traced steps at the beginning in
    which the host only gained its lead; without_work: those that launch nothing. NaN: not known. No row without a
    device.
    """
    if not has_device:
        columns = ["ratio", "after", "after_noise", "longer", "linked", "left_out", "without_work"]
        return pd.DataFrame(columns=columns, dtype=float)
    overhead = timing.get().overhead
    after, noise, longer = _after(light_steps.get()) if light_steps else (np.nan, np.nan, "")
    row = {
        "ratio": np.nan if overhead is None else overhead,
        "after": after,
        "after_noise": noise,
        "longer": longer,
        "linked": trace_window.linked,
        "left_out": float((~trace_window.settled).sum()) if trace_window.unit == "step" else 0.0,
        "without_work": float((~trace_window.launches).sum()),
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
