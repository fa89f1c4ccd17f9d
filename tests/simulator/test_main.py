"""`python -m simulator` writes a recording that dlprof reads, and tells the truth about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.read.run import open_run
from simulator.__main__ import main


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    main(argv)
    made: dict[str, object] = json.loads(capsys.readouterr().out)
    return made


def test_a_fault_and_its_fix_are_recorded_with_their_truth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted = said(capsys, "item_every_step", "--out", str(tmp_path / "planted"), "--seed", "1")
    fixed = said(capsys, "item_every_step", "--out", str(tmp_path / "fixed"), "--seed", "1", "--fixed")
    assert (planted["rule"], planted["line"]) == ("host_sync", "train.py:16")
    assert planted["fixed_ns"] == fixed["fixed_ns"] == fixed["period_ns"]
    assert isinstance(planted["period_ns"], float)
    assert isinstance(fixed["period_ns"], float)
    assert fixed["period_ns"] < 0.95 * planted["period_ns"]
    for name in ("planted", "fixed"):
        assert [rank.index for rank in open_run(tmp_path / name).ranks] == [0]


def test_without_a_fault_it_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert "item_every_step         host_sync" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["item_every_step"],
        ["item_every_step", "--out", "."],
        ["item_every_step", "--healthy", "--out", "job"],
        ["small_batch", "--fixed", "--out", "job"],
        ["no_such_fault", "--out", "job"],
    ],
)
def test_what_cannot_be_written_is_a_usage_error(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
