"""The error that a process ends with: kept where it is one of memory, with the user's line, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dlprof.record.collectors.facts import memory_failure


@pytest.mark.parametrize(
    ("line", "kind"), [("torch.empty(1 << 50)", "RuntimeError"), ("bytearray(1 << 55)", "MemoryError"), ("1 / 0", "")]
)
def test_what_python_prints_last_is_what_ended_it(tmp_path: Path, line: str, kind: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import atexit, json, torch\n"
        "from dlprof.record.collectors.facts import memory_failure\n"
        "atexit.register(lambda: print(json.dumps(memory_failure())))\n"
        f"def forward():\n    return {line}\n"
        "forward()\n"
    )
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    found = json.loads(out.stdout)
    assert out.returncode == 1
    if not kind:
        assert found is None
        return
    assert found["type"] == kind
    assert found["site"] == f"forward ({script}:5)"


def test_a_process_that_goes_on_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("last_value", "last_exc"):
        monkeypatch.delattr(sys, name, raising=False)
    assert memory_failure() is None
