"""A recording keeps the script's own files as far as quoted lines are kept, once, and only where that is wanted."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from tests.fixtures.jobs import TORCHRUN, environment, launch, tiny, wrapped

pytest.importorskip("torch", reason="recording needs torch")

BODY = """
    import pack.early  # the secret: hunter2
    password = "hunter2"
    train(data[:8])
    import pack.late, beside
    with open(__file__, "a") as file:  # edited while it runs
        file.write("# more\\n")
    train(data[:8])
"""


def kept(folder: Path, *options: str, before: tuple[str, ...] = ()) -> Path:
    """Record a script in app/ that imports two modules from there and one from elsewhere; return its rank's file."""
    for name in ("app/pack/early.py", "app/pack/late.py", "lib/beside.py", "app/pack/large.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x = 'hunter2' + str(1)\n" + "y = 1\n" * (500_000 if "large" in name else 0))
    script = tiny(folder / "app", BODY.replace("pack.late", "pack.late, pack.large") if not before else BODY)
    env = environment(PYTHONPATH=str(folder / "lib"))
    command = wrapped(folder / "r", [sys.executable, *before, script], "--no-trace", "--no-sample", *options)
    done = launch(command, folder / "app", env=env)
    assert done.returncode == 0, done.stderr
    return folder / "r/ranks/00000/sources.json"


def test_the_scripts_own_files_are_kept_without_strings_and_comments(tmp_path: Path) -> None:
    path = kept(tmp_path)
    assert b"hunter2" not in path.read_bytes()
    files = json.loads(path.read_text())["files"]
    assert set(files) == {"train.py", "pack/early.py", "pack/late.py"}
    for name in ("pack/early.py", "pack/late.py"):
        assert files[name]["sha256"] == hashlib.sha256((tmp_path / "app" / name).read_bytes()).hexdigest()
    assert files["pack/late.py"]["text"] == "x = '…' + str(1)\n"
    # As it was when it was read.
    script = (tmp_path / "app/train.py").read_text()
    assert files["train.py"]["sha256"] == hashlib.sha256(script.removesuffix("# more\n").encode()).hexdigest()
    assert len(files["train.py"]["text"].splitlines()) == len(script.splitlines()) - 1


def test_nothing_is_kept_where_that_is_not_wanted(tmp_path: Path) -> None:
    assert not kept(tmp_path, "--no-sources").exists()


@pytest.mark.long
def test_rank_0_alone_keeps_them(tmp_path: Path) -> None:
    path = kept(tmp_path, before=TORCHRUN)
    assert path.exists()
    assert not (path.parent.parent / "00001/sources.json").exists()
