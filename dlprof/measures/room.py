"""How much of the mean steady step there is to save from: what `time` shows of some categories, blame included."""

from __future__ import annotations

from collections.abc import Iterable

from dlprof.engine import Measured
from dlprof.measures.breakdown import breakdown

# A rank that waits for another shows it as one of these; without a trace, as the last.
_WAITING = ("communication", "pipeline_bubble", "other")


def room(run: Measured, categories: Iterable[str]) -> float:
    """Give the most that work on some categories can take off the mean steady step, ns.

    That is, on the rank where it is most, the rank's own time in them, and of its waiting as much as the other ranks
    have of them: a job's step is one for all, and in the steps in which another rank stands still this one waits.
    Raises NotMeasured where the step is not divided.
    """
    frame = run.frame(breakdown)
    parts = frame.pivot_table(index="rank", columns="category", values="ns", aggfunc="sum", observed=True).fillna(0.0)
    chosen = set(categories)
    own = parts[[c for c in parts if c in chosen]].sum(axis=1)
    waits = parts[[c for c in parts if c in _WAITING and c not in chosen]].sum(axis=1)
    elsewhere = own.sum() - own
    return float((own + elsewhere.clip(upper=waits)).max())
