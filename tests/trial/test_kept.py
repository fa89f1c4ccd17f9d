"""What was tried is kept in the run folder, and every result of that run has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.result import Result, RunInfo
from dlprof.result.tried import Attempt, Tried
from dlprof.trial.job import keep, kept, with_tried

FOUND = Tried("complete", (Attempt({"gc.freeze": True}, "no_gain"),), runs=3)
RESULT = Result(run=RunInfo("run"), window=None)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert kept(tmp_path) is None
    assert with_tried(RESULT, tmp_path) is RESULT
    keep(tmp_path, FOUND)
    assert kept(tmp_path) == FOUND
    assert with_tried(RESULT, tmp_path).tried == FOUND


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format":1}', '{"format":9,"state":"complete"}', "[" * 100_000])
def test_a_broken_file_costs_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "try.json").write_text(text)
    with pytest.raises(DlprofError, match=r"try\.json"):
        kept(tmp_path)
    found = with_tried(RESULT, tmp_path)
    assert found.tried is None
    (warning,) = found.run.warnings
    assert "try.json" in warning


def test_a_trace_file_has_none(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text("{}")
    assert kept(tmp_path / "rank0.json") is None


def test_a_link_that_leads_out_is_not_followed(tmp_path: Path) -> None:
    keep(tmp_path, FOUND)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "try.json").symlink_to(tmp_path / "try.json")
    assert kept(tmp_path / "run") is None


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "try.json")
    assert kept(tmp_path) is None


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match="cannot be written"):
        keep(tmp_path / "no", FOUND)
