"""`dlprof export` writes what it is asked for, says what is in it, and loses nothing else where one part fails."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dlprof.cli import cli
from tests.fixtures import runs, traces


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, words)])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return runs.foreign(tmp_path / "traces", *(traces.training(rank=r) for r in range(2)))


def test_a_trace_and_tables(job: Path) -> None:
    done = run(job, "--perfetto", "out.json.gz", "--csv", "tables", "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("out.json.gz: ")
    assert "tables: 4 tables, " in done.stdout
    assert json.loads(gzip.decompress(Path("out.json.gz").read_bytes()))["traceEvents"]
    assert Path("tables/tables/00001/spans.csv").is_file()
    assert sorted(p.name for p in job.parent.iterdir()) == ["out.json.gz", "tables", "traces"]


def test_what_fails_is_one_line_and_costs_nothing_else(job: Path) -> None:
    done = run(job, "--perfetto", "out.json", "--speedscope", "stacks.json")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("dlprof: ")
    assert "no Python stacks were seen" in done.stderr
    assert json.loads(Path("out.json").read_text())["traceEvents"]
    assert not Path("stacks.json").exists()


def test_it_must_be_told_what_to_write(job: Path) -> None:
    done = run(job)
    assert done.exit_code == 2
    assert "--perfetto FILE" in done.stderr
