"""How many steps each run measures: enough seconds and steps for a mean, and whole epochs where these are short."""

from __future__ import annotations

import math

# A window so long holds the batches of all workers, and outlasts what other guests of a host disturb: a second or two.
# A run takes five to ten seconds more to start, so that a shorter one would spend most of the time on starting.
WINDOW_S = 8.0
LEAST_STEPS, MOST_STEPS = 30, 2_000

# Steps that a change has made much shorter must last for so long too.
LEAST_S = 2.0

FEWEST_STEPS = 8  # where steps are so long that no more fit

# A window may take this part of the time at most, or too few runs fit into it.
SHARE = 1 / 16

# Whole epochs are measured from the first one after the warm-up: so many of them hold two whole ones.
EPOCHS = 3.2


def steps_of_window(step_ns: float | None, epoch: int | None, seconds: float) -> int:
    """Return how many steady steps each run measures, by the recorded step, and steps of an epoch (None: not known)."""
    if not step_ns or step_ns <= 0:
        return LEAST_STEPS
    most = max(int(SHARE * seconds * 1e9 / step_ns), FEWEST_STEPS)
    wanted = min(max(math.ceil(WINDOW_S * 1e9 / step_ns), LEAST_STEPS), MOST_STEPS)
    if epoch is not None:
        whole = math.ceil(EPOCHS * epoch)
        wanted = max(wanted, whole) if whole <= most else wanted
    return min(wanted, most)
