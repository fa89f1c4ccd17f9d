"""A recording keeps the own files of rank 0 as far as quoted lines are kept, and only where that is wanted."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import rows

pytest.importorskip("torch", reason="recording needs torch")

BODY = """
import os, torch
os.utime(__file__, (0, 0))  # as if it was older than the recording
import pack.early  # the secret: hunter2
password = "hunter2"
model = torch.nn.Linear(8, 1)
model(torch.ones(4, 8)).sum().backward()
import pack.late, pack.large, beside
with open(__file__, "a") as file:  # edited while it runs
    file.write("# more\\n")
model(torch.ones(4, 8)).sum().backward()
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Return what records, as one rank, a script in app/ that imports modules from there and one from elsewhere.

    It returns the rank's file.
    """
    for name in ("app/pack/early.py", "app/pack/late.py", "lib/beside.py", "app/pack/large.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 'hunter2' + str(1)\n" + "#" * (3 << 20 if "large" in name else 0))
    monkeypatch.chdir(tmp_path / "app")
    for folder in ("app", "lib"):
        monkeypatch.syspath_prepend(tmp_path / folder)

    def run(rank: int = 0) -> Path:
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        try:
            run_recorded(tmp_path / "app", BODY)
        finally:
            for name in ("pack", "pack.early", "pack.late", "pack.large", "beside"):
                sys.modules.pop(name, None)
        return tmp_path / f"app/run/ranks/{rank:05d}"

    return run


def test_the_scripts_own_files_are_kept_without_strings_and_comments(
    record: Callable[..., Path], tmp_path: Path
) -> None:
    path = record()
    assert b"hunter2" not in (path / "records.jsonl").read_bytes()
    files = rows(path, "sources")[-1]["files"]
    assert set(files) == {"train.py", "pack/early.py", "pack/late.py"}
    for name in ("pack/early.py", "pack/late.py"):
        assert files[name]["sha256"] == hashlib.sha256((tmp_path / "app" / name).read_bytes()).hexdigest()
    assert files["pack/late.py"]["text"] == "x = '…' + str(1)\n"
    # As it was when it was read.
    assert files["train.py"]["sha256"] == hashlib.sha256(BODY.encode()).hexdigest()
    assert len(files["train.py"]["text"].splitlines()) == len(BODY.splitlines())


@pytest.mark.parametrize(("option", "rank"), [("off", 0), ("on", 1)])
def test_nothing_is_kept_where_that_is_not_wanted_nor_by_other_ranks(
    option: str, rank: int, record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLPROF_SOURCES", option)
    path = record(rank)
    assert (path / "records.jsonl").exists()
    assert rows(path, "sources") == []
