"""Why a job's steps were traced again, and what had become slower since its first trace window, by the step log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dlprof.analysis.engine import RANK, Frame, RankFacts, needs, per_rank
from dlprof.analysis.timeline.steady import light_steps
from dlprof.units import digits, duration, listed

# So many steady steps next to a window are compared, and at least so many: means of fewer are of single steps.
_NEAR, _FEWEST = 20, 10

# From this ratio on steps are called slower, as in a rank; in healthy jobs on shared machines it is up to 1.2.
_SLOWER = 1.25

# What stands before a later window: its warm-up.
_WARMUP = 4

_PHASES = ("fetch", "forward", "backward", "optimizer")
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
    means = {"dur": steps["dur_ns"].mean()} | {p: steps[f"{p}_ns"].clip(lower=0).mean() for p in _PHASES}
    means["rest"] = means["dur"] - sum(means[p] for p in _PHASES)
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
    hint = f" (`dlprof report RUN --window {others[0]}` reads {'it' if len(others) == 1 else listed(others)})"
    return f"{steps}{why}{hint if others else ''}"
