"""`dlprof check` passes, fails with exit code 3, and fails too where it cannot tell."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dlprof.cli import cli
from tests.fixtures import runs, traces
from tests.fixtures.readings import crowded
from tests.fixtures.runs import MS


def waiting(folder: Path, step: int, wait: int) -> Path:
    """Write a trace of one rank whose steps of so many ns wait so long for data, and do nothing else but compute."""
    made = []
    for n in range(6):
        t = 10_000_000 + n * 1_000_000
        kernel = traces.launched("sm90_gemm", t + wait, t + wait + 1_000, step - wait - 1_000, n + 1)
        made += [traces.step(n, t, step), traces.fetch(t, wait), *kernel]
    return traces.write(folder / "rank0.json", traces.trace(*made, world_size=1))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return waiting(tmp_path_factory.mktemp("job"), 990_000, 300_000)


def check(path: Path, *limits: str) -> Result:
    words = [w for limit in limits for w in ("--max", limit)]
    return CliRunner().invoke(cli, ["check", str(path), *words])


def test_limits(job: Path) -> None:
    done = check(job, "input_wait<5%", " input_wait < 29.5 % ", "input_wait<0.1ms", "input_wait<200us")
    assert (done.exit_code, [line[:16] for line in done.stdout.splitlines()]) == (3, ["FAIL  input_wait"] * 4)
    done = check(job, "input_wait<40%", "input_wait<0.4ms", "input_wait<1s", "pageable_copy<1%", "straggler<50%")
    *waits, copies, straggler = done.stdout.splitlines()
    assert (done.exit_code, [line[:16] for line in waits]) == (0, ["ok    input_wait"] * 3)
    assert copies.startswith("ok    pageable_copy")
    assert straggler.startswith("ok    straggler < 50 %: does not apply: one rank")
    done = check(job, "memory_growth<50%")
    assert (done.exit_code, "not measured: no record of every step" in done.stdout) == (3, True)


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("no_such<5%", 1),
        *((limit, 2) for limit in ("input_wait", "input_wait>5%", "input_wait<5", "input_wait<-5%", "<5%")),
    ],
)
def test_what_is_no_limit(job: Path, limit: str, code: int) -> None:
    done = check(job, limit)
    assert (done.exit_code, done.stdout) == (code, "")


def test_what_is_below_a_rules_threshold_is_checked_by_its_figure(tmp_path: Path) -> None:
    """Steps of 1 ms wait 40 µs for data: no finding, and more than 2 % all the same."""
    done = check(waiting(tmp_path, 1_000_000, 40_000), "input_wait<2%", "input_wait<5%")
    assert done.exit_code == 3
    first, second = done.stdout.splitlines()
    assert first.startswith("FAIL  input_wait < 2 %: 4.")
    assert second.startswith("ok    input_wait < 5 %: 4.")


@pytest.mark.long
def test_a_run_beside_other_programs_passes_no_limit_unless_it_is_allowed(tmp_path: Path) -> None:
    """One rank of two cores, somebody else on six of the eight, and its training thread waits for 30 % of the time."""
    path = crowded(tmp_path, 0.3, threads=4, others=6.0, ours=2.0)
    done = check(path, "input_wait<5%")
    assert done.exit_code == 3
    assert done.stdout.startswith("????  input_wait")
    assert "FAIL  programs outside the job used 6 of 8 cores" in done.stdout
    allowed = CliRunner().invoke(cli, ["check", str(path), "--max", "input_wait<5%", "--foreign-load"])
    assert allowed.exit_code == 0
    assert "warn  programs outside the job" in allowed.stdout
    quiet = check(crowded(tmp_path / "quiet", 0.0, threads=4, ours=2.0), "input_wait<5%")
    assert (quiet.exit_code, "outside" in quiet.stdout) == (0, False)


def timed(folder: Path, step_ms: float, script: str = "train.py") -> Path:
    """Record 200 steps of about so long."""
    draw = np.random.default_rng(int(step_ms * 10))
    lengths = (step_ms * MS * (1 + 0.02 * draw.standard_normal(200))).astype(int).tolist()
    rows = [runs.light(n, ns, n * 1_000 * MS) for n, ns in enumerate(lengths)]
    return runs.recorded(folder, (None, rows, runs.CPU), command=["python", script])


def against(path: Path, baseline: Path, *more: str) -> Result:
    return CliRunner().invoke(cli, ["check", str(path), "--baseline", str(baseline), *more])


@pytest.mark.long
def test_a_run_that_is_slower_than_its_baseline_fails(tmp_path: Path) -> None:
    before, slower, same = timed(tmp_path / "a", 100), timed(tmp_path / "b", 106), timed(tmp_path / "c", 100.1)
    done = against(slower, before)
    assert done.exit_code == 3
    assert done.stdout.startswith("FAIL  slower than")
    assert "% slower (99 % interval +" in done.stdout
    assert against(same, before).exit_code == 0
    assert against(slower, before, "--max-slowdown", "10%").exit_code == 0


def test_a_baseline_of_another_script_is_not_judged(tmp_path: Path) -> None:
    before, other = timed(tmp_path / "a", 100), timed(tmp_path / "b", 100, "other.py")
    done = against(other, before)
    assert (done.exit_code, "another script" in done.stdout) == (3, True)
    assert against(other, before, "--not-measured", "pass").exit_code == 0


@pytest.mark.long
def test_what_cannot_be_measured_may_pass(job: Path) -> None:
    words = ["check", str(job), "--max", "memory_headroom<5%"]
    assert CliRunner().invoke(cli, words).exit_code == 3
    done = CliRunner().invoke(cli, [*words, "--not-measured", "pass"])
    assert (done.exit_code, done.stdout.startswith("????")) == (0, True)


def test_outcomes_as_junit_and_annotations(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    out = tmp_path / "speed.xml"
    limits = [
        "--max",
        "input_wait<5%",
        "--max",
        "input_wait<90%",
        "--max",
        "memory_headroom<5%",
        "--not-measured",
        "pass",
    ]
    done = CliRunner().invoke(cli, ["check", str(job), *limits, "--junit", str(out)])
    assert done.exit_code == 3
    lines = [line for line in done.stdout.splitlines() if line.startswith("::")]
    assert [line.split()[0] for line in lines] == ["::error", "::warning"]
    assert "title=dlprof%3A input_wait < 5 %25" in lines[0]
    suite = ElementTree.parse(out).getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    assert [child.tag for case in suite for child in case] == ["failure", "system-out", "skipped"]


def test_mistakes(job: Path) -> None:
    assert CliRunner().invoke(cli, ["check", str(job)]).exit_code == 2
    assert against(job, job, "--max-slowdown", "much").exit_code == 2
    assert against(job, job / "none").exit_code == 1
