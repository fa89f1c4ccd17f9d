"""However a script is started and whatever surrounds it: its output and status are as ever, and it is recorded."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from tests.fixtures.jobs import DLPROF, environment, facts, launch, rows, wrapped

pytest.importorskip("torch", reason="recording needs torch")

TRAINS = """
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for n in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
"""


@pytest.mark.long
def test_odd_names_limits_and_settings(tmp_path: Path) -> None:
    """One job in all of them at once: any one that did harm would show."""
    home = tmp_path / "a folder\nof two lines ü"
    home.mkdir()
    (home / "my script.py").write_text(
        TRAINS
        + dedent(
            r"""
            import os, resource, sys
            os.umask(0o077)
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (24, most))
            train(30)
            sys.stdout.buffer.write(b"\xff\xfe not text \x80\n" + sys.stdin.buffer.read())
            path = os.environ["PYTHONPATH"].split(":")[-1]
            print(len(sys.argv[1]), sys.argv[2:], __file__, sys.flags.safe_path, path)
            """
        )
    )
    long = "x" * 100_000
    env = environment(PYTHONPATH=str(tmp_path), PYTHONSAFEPATH="1")
    plain = [sys.executable, "-X", "importtime", str(home / "my script.py"), long, "", "-o", "--", "é"]
    said = []
    for command in (plain, wrapped(home / "run 1", plain, "--window", "5,1,2")):
        done = subprocess.run(command, cwd=tmp_path, env=env, input=b"typed \xc3\n", capture_output=True, check=True)
        said.append(done.stdout)
    assert said[0] == said[1]
    assert b"not text" in said[0]
    rank = home / "run 1/ranks/00000"
    assert len(rows(rank)) == 30
    assert facts(rank)["warnings"] == []
    assert facts(rank)["window"]["state"] == "exported"
    assert (rank / "trace.json.gz").stat().st_size > 1000


def package(folder: Path) -> list[str]:
    """A package that imports its own modules by their relative names."""
    (folder / "package/inner").mkdir(parents=True)
    (folder / "package/__init__.py").write_text("")
    (folder / "package/inner/__init__.py").write_text("")
    (folder / "package/model.py").write_text(TRAINS)
    main = "from ..model import train\ntrain(12)\nprint(__name__, __package__)\n"
    (folder / "package/inner/__main__.py").write_text(main)
    return ["-m", "package.inner"]


def zipped(folder: Path) -> list[str]:
    with zipfile.ZipFile(folder / "app.pyz", "w") as app:
        app.writestr("__main__.py", TRAINS + "train(12)\nprint(__name__)\n")
    return ["--", sys.executable, "app.pyz"]


def suite(folder: Path) -> list[str]:
    body = (
        TRAINS
        + "def test_a():\n    train(6)\n\n\ndef test_b(capfd):\n    train(6)\n    assert capfd.readouterr().err == ''\n"
    )
    (folder / "test_training.py").write_text(body)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    return ["--", sys.executable, "-m", "pytest", *options, "test_training.py"]


@pytest.mark.long
@pytest.mark.parametrize("made", [package, pytest.param(zipped, marks=pytest.mark.slow), suite])
def test_ways_to_start_a_script(made: Callable[[Path], list[str]], tmp_path: Path) -> None:
    words = made(tmp_path)
    done = launch([*DLPROF, "wrap", "-o", "run", "--no-report", "--no-trace", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    if made is package:
        assert done.stdout == "__main__ package.inner\n"
    assert [path.name for path in (tmp_path / "run/ranks").iterdir()] == ["00000"]
    assert len(rows(tmp_path / "run/ranks/00000")) == 12
    assert facts(tmp_path / "run/ranks/00000")["warnings"] == []


NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(source) for source in open(sys.argv[1]).read().split("# cell\\n")]
notebook = NotebookClient(nbformat.v4.new_notebook(cells=cells)).execute()
print(notebook.cells[-1].outputs[0].text, end="")
"""


@pytest.mark.long
def test_a_notebook(tmp_path: Path) -> None:
    for name in ("ipykernel", "nbclient"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    (tmp_path / "execute.py").write_text(NOTEBOOK)
    (tmp_path / "cells.txt").write_text(TRAINS + "# cell\ntrain(10)\n# cell\ntrain(10)\nprint('trained')\n")
    command = [sys.executable, "execute.py", "cells.txt"]
    done = launch(wrapped(tmp_path / "run", command, "--window", "3,1,2"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
    (rank,) = (tmp_path / "run/ranks").iterdir()
    assert len(rows(rank)) == 20
    assert facts(rank)["window"]["state"] == "exported"
    assert facts(rank)["warnings"] == []
