"""What a command leaves is told: that nothing was recorded, and why, or which of its ranks still run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dlprof.remains import missing
from tests.jobs import launch, wrapped


def test_a_run_that_recorded_nothing_says_why(tmp_path: Path) -> None:
    isolated = launch(wrapped(tmp_path / "a", [sys.executable, "-I", "-c", "pass"]), tmp_path)
    assert "the hook was never reached" in isolated.stderr
    shell = launch(wrapped(tmp_path / "b", ["true"]), tmp_path)
    assert "the hook was never reached" in shell.stderr
    plain = launch(wrapped(tmp_path / "c", [sys.executable, "-c", "pass"]), tmp_path)
    assert "never imported torch" in plain.stderr
    assert "never imported torch" in json.loads((tmp_path / "c/run.json").read_text())["warnings"][0]
    (tmp_path / "c/ranks/00000").mkdir()
    (tmp_path / "c/ranks/00000/facts.json").write_text("{}")
    assert missing(tmp_path / "c") == []
