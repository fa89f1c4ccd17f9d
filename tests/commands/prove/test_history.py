"""`dlprof history` finds runs below a folder, and tells what changed."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from dlprof.cli import cli
from dlprof.files import compact
from dlprof.result.stored import to_json
from tests.fixtures import runs
from tests.fixtures.comparisons import run
from tests.fixtures.runs import MS

DAY = 86_400 * 10**9


def recorded(folder: Path, day: int, step: int, script: str = "train.py") -> None:
    rows = [runs.light(n, step * MS, n * step * MS, samples=8) for n in range(30)]
    runs.recorded(folder, (None, rows, runs.CPU), command=["python", script], start_ns=day * DAY)


def test_runs_below_a_folder(tmp_path: Path) -> None:
    recorded(tmp_path / "runs/b", 1, 100)
    recorded(tmp_path / "runs/a", 2, 50)
    recorded(tmp_path / "runs/deeper/c", 3, 50)
    recorded(tmp_path / "runs/x", 3, 50, "other.py")
    (tmp_path / "runs/broken/ranks").mkdir(parents=True)
    done = CliRunner().invoke(cli, ["history", "--quiet", str(tmp_path / "runs")])
    assert done.exit_code == 0
    assert "Since a the job is" in done.stdout
    assert "x is left out: it ran other.py" in done.stdout
    assert "broken is left out" in done.stdout
    whole = CliRunner().invoke(cli, ["history", "--quiet", str(tmp_path / "runs"), "--format", "json"])
    assert [r["name"] for r in json.loads(whole.stdout)["runs"]] == ["b", "a", "c"]
    page = ["history", "--quiet", str(tmp_path / "runs"), "-o", str(tmp_path / "out")]
    assert CliRunner().invoke(cli, page).exit_code == 0
    assert (tmp_path / "out/history.html").is_file()


def test_results_alone(tmp_path: Path) -> None:
    for name, step in (("a", 100), ("b", 50)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(compact(to_json(run(step))))
    done = CliRunner().invoke(cli, ["history", "--quiet", str(tmp_path)])
    assert done.exit_code == 0
    assert "2 runs" in done.stdout


def test_mistakes(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["history", "--quiet", str(tmp_path)])
    assert (done.exit_code, "no run" in done.output) == (1, True)
    recorded(tmp_path / "a", 1, 100)
    done = CliRunner().invoke(cli, ["history", "--quiet", str(tmp_path), "--script", "none.py"])
    assert (done.exit_code, "no run of none.py" in done.output) == (1, True)
