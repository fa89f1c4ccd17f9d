"""The time of lines, as it travels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.analysis.host.lines import MOST_FUNCTIONS, MOST_LINES, line_times
from dlprof.errors import NotMeasured
from tests.fixtures.runs import CPU, light, measured, recorded

MS = 1_000_000


def run(folder: Path, *ranks: list[dict[str, object]]) -> Path:
    steps = [light(n, 10 * MS) for n in range(5)]
    recorded(folder, *((None, steps, CPU) for _ in ranks))
    for n, pieces in enumerate(ranks):
        (folder / f"ranks/{n:05d}/lines.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pieces))
    return folder


def piece(function: str, lines: list[tuple[int, int, int]], **said: object) -> dict[str, object]:
    return {"role": "main", "function": function, "file": "data.py", "first": 1, "lines": lines} | said


def test_what_travels_is_bounded_and_what_never_ran_is_left_out(tmp_path: Path) -> None:
    long = [piece(f"data:f{n}", [(k, 1, k + n) for k in range(1, 500)], file=f"{n}.py") for n in range(20)]
    frame = measured(run(tmp_path / "a", long), line_times).frame(line_times)
    assert frame["function"].nunique() == MOST_FUNCTIONS
    assert frame["function"].iloc[0] == "data:f19"
    assert set(frame.groupby("function")["line"].count()) == {MOST_LINES}
    assert frame["line"].iloc[0] == 500 - MOST_LINES
    idle = run(tmp_path / "b", [piece("data:f", [(2, 0, 0)])])
    with pytest.raises(NotMeasured, match="no function that --lines names was called"):
        measured(idle, line_times).frame(line_times)
