"""`dlprof compare` says what differs between two runs, and whether a prediction came true, on recordings by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlprof.cli import cli
from tests.fixtures import runs
from tests.fixtures.runs import CPU, MS, light


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, words)])


def odd(n: int) -> int:
    return MS if n % 2 else -MS


def job(folder: Path, step: int, wait: int, workers: int, world: int = 1) -> Path:
    """Record steps of so many ms with so long a wait for the loader, both a ms more or less in turn."""
    loader = {"role": "train", "num_workers": workers, "batch_size": 8, "persistent_workers": workers > 0}
    facts = {**CPU, "loaders": [loader], "cpu": {"affinity": 8, "count": 8}}
    steps = [light(n, step * MS + odd(n), fetch_ns=wait * MS + odd(n)) for n in range(63)]
    return runs.recorded(folder, *[(None, steps, facts) for _ in range(world)])


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a run that waits 40 of its 100 ms for data, and one with two workers that takes 62; stand beside them."""
    monkeypatch.chdir(tmp_path)
    return job(tmp_path / "slow", 100, 40, 0), job(tmp_path / "fixed", 62, 2, 2)


def test_what_was_predicted_is_held_against_what_was_measured(pair: tuple[Path, Path]) -> None:
    done = run(*pair)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "B is 1.61 × faster: a step takes 62.0 ms instead of 100.0 ms." in said
    assert "Predicted 60.0 ms for num_workers 0 → 2" in said
    assert "less than predicted, 95 % of the gain (predicted by input_wait)." in said
    assert done.stdout.splitlines()[-1] == "page: dlprof-compare/compare.html"
    assert sorted(p.name for p in Path("dlprof-compare").iterdir()) == ["compare.html", "compare.json"]


def test_json_is_the_comparison_and_nothing_else(pair: tuple[Path, Path]) -> None:
    done = run(*pair, "--format", "json", "-o", "out", "--quiet")
    told: dict[str, Any] = json.loads(done.stdout)
    assert done.stderr == ""
    assert told["step"]["ns"] == pytest.approx(-38 * MS, abs=0.1 * MS)
    assert told["step"]["verdict"] == "faster"
    assert {d["name"]: d["verdict"] for d in told["time"]} == {"input_wait": "faster", "other": "noise"}
    assert told["prediction"]["findings"] == ["input_wait"]
    assert told["prediction"]["most_ns"] == pytest.approx(60 * MS, abs=0.1 * MS)
    assert [f["state"] for f in told["findings"] if f["id"] == "input_wait"] == ["less"]  # 2 ms are left
    assert ("num workers", "0", "2") in {(s["name"], s["a"], s["b"]) for s in told["settings"]}
    assert json.loads(Path("out/compare.json").read_text()) == told


def test_a_result_will_do_for_its_run(pair: tuple[Path, Path]) -> None:
    assert CliRunner().invoke(cli, ["report", str(pair[0]), "-o", "a"]).exit_code == 0
    whole = json.loads(run(*pair, "--format", "json").stdout)
    from_file = json.loads(run("a/result.json", pair[1], "--format", "json").stdout)
    assert from_file == whole


def test_a_broken_result_is_one_line(pair: tuple[Path, Path]) -> None:
    Path("result.json").write_text('{"format":1,"saving":"')
    done = run("result.json", pair[1])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("dlprof: result.json: cannot be read")


def test_more_than_two_runs_are_a_ladder(pair: tuple[Path, Path], tmp_path: Path) -> None:
    last, broken = job(tmp_path / "last", 50, 1, 4), tmp_path / "broken"
    (broken / "ranks").mkdir(parents=True)
    done = run(*pair, broken, last, "-o", "out")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "The last run is 2.00 × as fast as the first" in said
    assert "The largest gain is 1.61 × by fixed (num workers 0 → 2)" in said
    assert "broken is left out" in said
    told: dict[str, Any] = json.loads((tmp_path / "out/ladder.json").read_text())
    assert [r["name"] for r in told["runs"]] == ["slow", "fixed", "last"]
    assert "What each change gave" in (tmp_path / "out/ladder.html").read_text(encoding="utf-8")
