"""What each schedule leaves idle, and what its ranks hold meanwhile: activations of micro-batches, copies of weights.

Of a schedule that torch runs, the grid is gone through: a rank holds what a forward pass leaves until the last half of
its backward pass is through. Of others there are closed forms alone, from Li and Hoefler, Chimera, SC 2021, table 2.
All of it is of stages alike, a backward pass twice as long as the forward pass, and handing over for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dlprof.analysis.pipeline.schedules import SCHEDULES, SINGLE, Action, grid, replay, runs, short

_TOOK = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}

GRID, FORMULA = "replayed", "closed form"


def most_held(row: Sequence[Action]) -> int:
    """Return the most micro-batches of a stage whose activations a rank holds at a time, over its actions in order."""
    held = most = 0
    for _, what, _ in row:
        held += {"forward": 1, "backward": -1, "weight": -1}.get(what, 0)
        most = max(most, held)
    return most


def schedules(ranks: int, microbatches: int) -> pd.DataFrame:
    """Return a row for each schedule that takes so many ranks and micro-batches.

    Columns: schedule, chunks (stages a rank; 2 where it needs several), idle (share of the step), activations (the most
    that a rank holds, as a share of what its layers leave of a whole batch), weights (copies of its parameters), how
    (GRID or FORMULA).
    """
    rows = [row for name in SCHEDULES if (row := _of_grid(name, ranks, microbatches)) is not None]
    return pd.DataFrame(
        [*rows, *_closed(ranks, microbatches)],
        columns=["schedule", "chunks", "idle", "activations", "weights", "how"],
    )


def _of_grid(name: str, ranks: int, microbatches: int) -> tuple[str, int, float, float, float, str] | None:
    chunks = 1 if name in SINGLE else 2
    if not runs(name, ranks, microbatches, chunks):
        return None
    made = grid(name, ranks, microbatches, chunks)
    step = replay(made.rows, {a: _TOOK[a[1]] / chunks for row in made.rows for a in row}, made.held)
    busy = microbatches * (_TOOK["forward"] + _TOOK["backward"])
    held = max(map(most_held, made.rows)) / chunks / microbatches
    return short(name), chunks, max(1 - busy / step, 0.0), held, 1.0, GRID


def _closed(ranks: int, microbatches: int) -> list[tuple[str, int, float, float, float, str]]:
    """Return schedules that torch does not run. Their weights are not all those of the last step, but Chimera's."""
    p, m = ranks, microbatches
    held = min(p, m) / m
    rows = [
        ("PipeDream (weights of older steps)", 1, 0.0, held, float(p), FORMULA),
        ("PipeDream-2BW (weights of the step before)", 1, 0.0, held, 2.0, FORMULA),
    ]
    if p % 2 == 0 and m >= p:
        rows.append(("Chimera (two pipelines, one each way)", 2, (p - 2) / (2 * m + p - 2), held, 2.0, FORMULA))
    return rows
