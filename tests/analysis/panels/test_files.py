"""The table of files: what each was taken for, for whom it is read, and why others are left."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.panels.machine import FILES_PICTURE, TITLE
from dlprof.errors import NotMeasured
from tests.fixtures import dialects, runs, traces


def test_files_of_one_kind_share_a_row_and_those_that_are_read_come_first(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path / "job", *(traces.training(rank=n, world_size=3) for n in range(3)))
    (path / "et.json").write_text(dialects.execution_trace())
    for n in range(5):
        (path / f"{n}.png").write_bytes(b"\x89PNG\r\n")
    (panel,) = runs.called(path, FILES_PICTURE.draw)
    assert panel.title == TITLE
    assert [(row[1], row[2]) for row in panel.rows] == [
        ("torch.profiler trace", "ranks 0 to 2"),
        ("not known", "left"),
        ("execution trace (PyTorch ET or Chakra)", "left"),
    ] or {(row[1], row[2]) for row in panel.rows[1:]} == {
        ("not known", "left"),
        ("execution trace (PyTorch ET or Chakra)", "left"),
    }
    assert panel.rows[0][2] == "ranks 0 to 2"
    assert any(row[0].startswith("5 files: ") for row in panel.rows)


def test_one_file_and_a_recording_need_no_table(tmp_path: Path) -> None:
    one = traces.write(tmp_path / "rank0.json", traces.training(world_size=1))
    run = runs.recorded(tmp_path / "run", (traces.training(world_size=1), [], runs.CPU))
    for path in (one, run):
        with pytest.raises(NotMeasured):
            runs.called(path, FILES_PICTURE.draw)
