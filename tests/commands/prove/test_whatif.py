"""`dlprof whatif` prints a prediction, writes a page where asked to, and says in one line what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dlprof.cli import cli
from tests.fixtures import loaders


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loaders.recorded(tmp_path_factory.mktemp("job"), fetch=60, cpu=1, workers=1)


def ask(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["whatif", "--quiet", *map(str, words)])


def test_as_json(job: Path) -> None:
    data = json.loads(ask(job, "--input", "perfect", "--workers", "3", "--format", "json").stdout)
    assert data["together"]["changes"] == ["perfect input", "workers 3"]
    assert data["together"]["step_ns"] < data["step_ns"]


def test_a_page(job: Path, tmp_path: Path) -> None:
    done = ask(job, "--input", "2x", "-o", tmp_path / "out")
    assert done.exit_code == 0
    assert "input 2 × as fast" in (tmp_path / "out/whatif.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "name a change"),
        (("--device", "fast"), 2, "is no speed"),
        (("--stages", "odd"), 2, "odd"),
    ],
)
def test_mistakes(job: Path, words: tuple[str, ...], code: int, said: str) -> None:
    done = ask(job, *words)
    assert (done.exit_code, said in done.output) == (code, True)
