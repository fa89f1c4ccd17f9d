"""The lines of stalls, whole, cut off and odd."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.readers import stalls

PAUSE = {"kind": "garbage_collection", "start_ns": 5, "dur_ns": 3, "step": 1, "generation": 2, "path": None}
SAVE = {"kind": "checkpoint", "start_ns": 9, "dur_ns": 4, "step": 2, "generation": None, "path": "/d/m.pt"}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_rows_are_in_order_of_time_and_what_does_not_apply_is_marked(tmp_path: Path) -> None:
    reading = stalls.read(write(tmp_path / "stalls.jsonl", {**SAVE, "phase": "optimizer", "new": 1}, "", PAUSE))
    assert reading.tables["stalls"].to_dict("records") == [
        {**PAUSE, "path": "", "phase": "rest", "reason": "", "count": 1},
        {**SAVE, "generation": -1, "phase": "optimizer", "reason": "", "count": 1},
    ]
    assert reading.warnings == ()


def test_a_cut_last_line_is_dropped_without_a_word_at_any_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "stalls.jsonl", PAUSE, SAVE)
    data = path.read_bytes()
    for cut in range(data.index(b"\n") + 1, len(data) - 1):
        path.write_bytes(data[:cut])
        reading = stalls.read(path)
        assert reading.tables["stalls"]["step"].to_list() == [1]
        assert reading.warnings == ()


@pytest.mark.parametrize("bad", ["{", "[1]", {**SAVE, "dur_ns": -1}, {**SAVE, "path": 7}, {"kind": "checkpoint"}])
def test_a_bad_line_in_the_middle_is_dropped_with_a_word(tmp_path: Path, bad: Any) -> None:
    reading = stalls.read(write(tmp_path / "stalls.jsonl", PAUSE, bad, SAVE))
    assert reading.tables["stalls"]["step"].to_list() == [1, 2]
    assert reading.warnings == ("stalls.jsonl: 1 lines are no stalls and are left out",)


def test_no_line_is_a_job_that_nothing_stalled(tmp_path: Path) -> None:
    reading = stalls.read(write(tmp_path / "stalls.jsonl"))
    assert (len(reading.tables["stalls"]), reading.warnings) == (0, ())


def test_what_is_no_log_of_stalls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match="none of its lines"):
        stalls.read(write(tmp_path / "stalls.jsonl", "a", "b"))
    with pytest.raises(DlprofError, match="no such file"):
        stalls.read(tmp_path / "none.jsonl")
