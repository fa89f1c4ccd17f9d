"""Makes recorded runs of pipelines by hand: any schedule, with chunks as long as a test wants them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlprof.measures.schedules import Action, grid
from tests import runs, traces
from tests.runs import MS

Row = tuple[Action, int, int]  # an action, and when it begins and how long it takes, ms


def alike(forward: int, backward: int) -> Callable[[Action], int]:
    """Return chunks that take as long on every stage, ms; each half of a backward, half of it."""
    return lambda a: {"forward": forward, "backward": backward}.get(a[1], backward // 2)


def laid_out(rows: Sequence[Sequence[Action]], took: Callable[[Action], int], hand_over: int = 0) -> list[list[Row]]:
    """Place every rank's actions as early as they can be, which is when what they need is there."""
    placed: list[list[Row]] = [[] for _ in rows]
    ends: dict[Action, int] = {}
    home = {stage: rank for rank, row in enumerate(rows) for stage, _, _ in row}
    last = max(home)
    while any(len(done) < len(row) for done, row in zip(placed, rows, strict=True)):
        for rank, (done, row) in enumerate(zip(placed, rows, strict=True)):
            if len(done) == len(row):
                continue
            stage, what, which = action = row[len(done)]
            begin = done[-1][1] + done[-1][2] if done else 0
            source = {"forward": stage - 1, "backward": stage + 1, "input": stage + 1}.get(what, -1)
            if 0 <= source <= last:
                kinds = ("forward",) if what == "forward" else ("backward", "input")
                there = [ends[source, kind, which] for kind in kinds if (source, kind, which) in ends]
                if not there:
                    continue
                begin = max(begin, there[0] + (hand_over if home[source] != rank else 0))
            ends[action] = begin + took(action)
            done.append((action, begin, took(action)))
    return placed


def recorded(
    folder: Path,
    schedule: str,
    ranks: int,
    microbatches: int,
    took: Callable[[Action], int],
    *,
    chunks: int = 1,
    hand_over: int = 0,
    step: int = 0,
    here: Sequence[int] | None = None,
    name: str = "",
    **facts: Any,
) -> Path:
    """Record 33 steps of a pipeline, of `step` ms (as long as the pipeline's where it is 0), and give the run folder.

    `here`: the ranks whose chunks were recorded, all by default. `name` stands for the schedule's in the facts.
    """
    placed = laid_out(grid(schedule, ranks, microbatches, chunks).rows, took, hand_over)
    call = max(start + dur for _, start, dur in placed[0])
    steps = [runs.light(n, (step or call) * MS, traces.BASE_NS + n * 10_000 * MS) for n in range(33)]
    told = {"schedule": name or schedule, "microbatches": microbatches, "num_stages": ranks * chunks}
    every = []
    for row in placed:
        stages = sorted({a[0] for a, _, _ in row})
        every.append({**runs.CPU, "pipeline": {**told, "stages": stages, "ranks": list(range(ranks))}, **facts})
    path = runs.recorded(folder / "run", *((None, steps, made) for made in every))
    for rank, row in enumerate(placed):
        if here is not None and rank not in here:
            continue
        begin, end = (0 if 0 in every[rank]["pipeline"]["stages"] else row[0][1]), row[-1][1] + row[-1][2]
        lines = []
        for n in range(33):
            zero = traces.BASE_NS + n * 10_000 * MS
            busy = sum(dur for _, _, dur in row) * MS
            at = {"start_ns": zero + begin * MS, "dur_ns": (end - begin) * MS, "busy_ns": busy}
            lines.append({"step": n, "action": "schedule", **at})
            for (stage, what, which), start, dur in row:
                at = {"start_ns": zero + start * MS, "dur_ns": dur * MS}
                lines.append({"step": n, "action": what, "stage": stage, "microbatch": which, **at})
        (path / f"ranks/{rank:05d}/chunks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
