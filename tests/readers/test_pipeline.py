"""The lines of a pipeline's chunks, whole, cut off and odd."""

import json
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.readers import pipeline

CALL = {"step": 3, "action": "schedule", "start_ns": 5, "dur_ns": 30, "busy_ns": 20}
CHUNK = {"step": 3, "action": "forward", "stage": 1, "microbatch": 0, "start_ns": 7, "dur_ns": 20}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_calls_and_chunks_are_in_order_of_time(tmp_path: Path) -> None:
    reading = pipeline.read(write(tmp_path / "chunks.jsonl", CHUNK, {**CALL, "new": 1}))
    assert reading.tables["chunks"].to_dict("records") == [
        {**CALL, "stage": -1, "microbatch": -1},
        {**CHUNK, "busy_ns": -1},
    ]
    assert reading.warnings == ()


def test_a_cut_last_line_is_dropped_without_a_word_and_a_bad_one_with(tmp_path: Path) -> None:
    path = write(tmp_path / "chunks.jsonl", CALL, {**CHUNK, "dur_ns": -1}, CHUNK)
    path.write_bytes(path.read_bytes()[:-9])
    reading = pipeline.read(path)
    assert reading.tables["chunks"]["action"].to_list() == ["schedule"]
    assert reading.warnings == ("chunks.jsonl: 1 lines are no chunks and are left out",)


def test_what_is_no_log_of_chunks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match="none of its lines"):
        pipeline.read(write(tmp_path / "chunks.jsonl", "a", "b"))
