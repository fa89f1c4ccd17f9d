"""What Python's own tracing costs at most: by the time that a step waits for Python, and which hook is on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.rules import traced_python
from tests.fixtures import runs
from tests.fixtures.ruled import Case, check, clear, found, jobs, unmeasured
from tests.fixtures.runs import MS

SCRIPT = "import tracemalloc\ndef main():\n    tracemalloc.start(10)\n    sys.settrace(trace)\n"


def running(folder: Path, fetch: int = 60, **process: Any) -> Path:
    """Record steps of 100 ms, of which the loader makes Python work for 60."""
    facts = {**runs.CPU, **({"process": process} if process else {})}
    steps = [runs.light(n, 100 * MS, fetch_ns=fetch * MS, forward_ns=20 * MS, backward_ns=20 * MS) for n in range(40)]
    path = runs.recorded(folder / "run", (None, steps, facts))
    kept = {"format": 1, "files": {"train.py": {"sha256": "", "text": SCRIPT}}}
    (path / "ranks/00000/sources.json").write_text(json.dumps(kept))
    return path


of = jobs(running)
CASES = {
    "tracemalloc": found(
        of(tracemalloc=True), 60 * MS * 11 / 12, "tracemalloc.stop()", where=[("train.py", 3)], at_most=True
    ),
    "a tracer": found(of(tracer="pdb.Pdb"), 60 * MS * 7.6 / 8.6, "sys.settrace(None)", where=[("train.py", 4)]),
    "a profiler": found(of(profiler="cProfile.Profile"), 60 * MS * 4.3 / 5.3),
    "both": found(of(tracemalloc=True, profiler="cProfile.Profile"), 60 * MS * 11 / 12),
    "monitors": found(of(monitors=["coverage"]), 60 * MS * 3.4 / 4.4),
    "little of it is Python's": clear(of(2, tracemalloc=True), pytest.approx(0.02, abs=0.005)),
    "none": clear(of(tracemalloc=False)),
    "not recorded": unmeasured(of()),
}


@pytest.mark.parametrize("name", CASES)
def test_traced_python(name: str, tmp_path: Path) -> None:
    case: Case = CASES[name]
    check(traced_python.RULE, case, tmp_path)
