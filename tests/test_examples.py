"""What `make demo` shows: the mistake of the example is found, and its line is changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.fixtures.jobs import DLPROF, launch
from tests.fixtures.places import ROOT


@pytest.mark.long
def test_the_first_change_is_the_fused_optimizer(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples/classifier.py", tmp_path)
    done = launch([*DLPROF, "wrap", "-o", "run", "--quiet", "classifier.py", "1"], tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "run/result.json").read_text())["changes"][0]
    assert "unfused_optimizer" in first["findings"]
    assert "+optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)" in first["change"]["diff"]
