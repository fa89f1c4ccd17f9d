"""How much of the mean steady step there is to save from: what `time` shows of some categories, blame included."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

# A rank that waits for another shows it as one of these; without a trace, as the last.
_WAITING = ("communication", "pipeline_bubble", "other")


def room(breakdown: pd.DataFrame, categories: Iterable[str]) -> float:
    """Return the most that work on some categories can take off the mean steady step, ns.

    That is, on the rank where it is most, the rank's own time in them, and of its waiting as much as the other ranks
    have of them: a job's step is one for all, and in the steps in which another rank stands still this one waits.
    Raises NotMeasured where the step is not divided.
    """
    chosen = set(categories)
    own, waits = ({int(r): 0.0 for r in breakdown["rank"].unique()} for _ in range(2))
    for rank, category, ns in zip(breakdown["rank"], breakdown["category"], breakdown["ns"], strict=True):
        if category in chosen:
            own[rank] += ns
        elif category in _WAITING:
            waits[rank] += ns
    total = sum(own.values())
    return float(max(own[r] + min(waits[r], total - own[r]) for r in own))
