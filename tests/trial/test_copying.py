"""A copy of the working directory holds what a script reads, and nothing that is only large."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.trial import running


def test_a_copy_is_the_folder_without_runs_and_repositories(tmp_path: Path) -> None:
    here = tmp_path / "here"
    for name in ("train.py", "data/a.txt", ".git/config", "runs/x/run.json", "sub/__pycache__/x.pyc"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    (here / "link").symlink_to("data")
    made = running.copied(here, tmp_path / "copy")
    assert sorted(p.relative_to(made).as_posix() for p in made.rglob("*") if p.is_file()) == [
        "data/a.txt",
        "train.py",
    ] + (["link/a.txt"] if (made / "link" / "a.txt") in made.rglob("*") else [])
    assert (made / "link").is_symlink()
    (made / "train.py").write_text("changed")
    assert (here / "train.py").read_text() == "train.py"


def test_a_copy_within_the_folder_holds_no_copy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x")
    (tmp_path / "run" / "try").mkdir(parents=True)
    made = running.copied(tmp_path, tmp_path / "run" / "try" / "0001-copy")
    assert (made / "train.py").is_file()
    assert not (made / "run" / "try").exists()


def test_a_folder_that_is_too_large_is_refused_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "data.bin").write_bytes(bytes(100))
    monkeypatch.setattr(running, "MOST_BYTES", 99)
    with pytest.raises(DlprofError, match="--copy"):
        running.copied(tmp_path / "here", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
