"""What the script's own profiler costs: by the steps without it, by how long it took to end, or not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.rules import own_profiler
from tests.fixtures import runs
from tests.fixtures.ruled import Case, check, clear, found, jobs, unmeasured
from tests.fixtures.runs import MS


def profiling(
    folder: Path, *theirs: dict[str, Any], longer: int = 3, device: dict[str, Any] | None = None, calls: Any = ()
) -> Path:
    """Record 60 steps of 10 ms, those within a profiler of the script's `longer` ms longer."""

    def dur(n: int) -> int:
        within = any(one["first_step"] <= n <= (99 if one["last_step"] is None else one["last_step"]) for one in theirs)
        return (10 + longer * within) * MS

    facts = {**runs.CPU, "window": {"state": "yielded", "theirs": [*theirs]}, "calls": [*calls]}
    facts |= {"device": device} if device else {}
    return runs.recorded(folder, (None, [runs.light(n, dur(n)) for n in range(60)], facts))


def theirs(first: int, last: int | None, exit_ms: float | None = None, shapes: bool = False) -> dict[str, Any]:
    exit_ns = None if exit_ms is None else int(exit_ms * MS)
    return {"first_step": first, "last_step": last, "exit_ns": exit_ns, "shapes": shapes}


of = jobs(profiling)
PLACE = {"kind": "profiler", "file": "train.py", "line": 9, "function": "main", "source": "with profile():"}
CASES = {
    # 30 of the steady steps have it.
    "some steps have it": found(
        of(theirs(20, 49, 900), calls=[PLACE]),
        None,
        *("30 steady steps", "13.0 ms with it, 10.0 ms without", "Measured", "schedule"),
        where=[("train.py", 9)],
        rows=[(pytest.approx(0.5, abs=0.1), pytest.approx(13 * MS), pytest.approx(10 * MS), 900 * MS)],
    ),
    "none of them longer": clear(of(theirs(20, 49, 900), longer=0)),
    # 60 steps, whose events took 900 ms to sort: a fifth of that.
    "all have it": found(of(theirs(0, 60, 900)), 0.2 * 15 * MS, "a factor of two"),
    "all have it, with shapes": found(of(theirs(0, 60, 900, shapes=True)), 0.12 * 15 * MS),
    "twice": found(of(theirs(0, 29, 300), theirs(29, 60, 600)), 0.2 * 15 * MS),
    "all have it, on a GPU": unmeasured(of(theirs(0, 60, 900), device=runs.A100), "in 100 % of the steady steps"),
    "it did not end": unmeasured(of(theirs(0, None))),
    "none": clear(of()),
    "before training": clear(of(theirs(0, 0, 50))),
}


@pytest.mark.parametrize("name", CASES)
def test_own_profiler(name: str, tmp_path: Path) -> None:
    case: Case = CASES[name]
    check(own_profiler.RULE, case, tmp_path)
