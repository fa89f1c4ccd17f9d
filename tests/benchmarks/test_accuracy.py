"""Recording what is missing: another run goes on where one was stopped, and leaves other machines' rows alone."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks import accuracy, summary
from benchmarks.accuracy import Planted
from benchmarks.summary import Recorded
from tests.fixtures import runs
from tests.fixtures.runs import MS

SCRIPT = """
import argparse, time
FAULTS = {"late": "input_wait", "later": "host_bound", "never": "host_sync"}
HEALTHY = {"wide": "--wide"}
SHOWN_WITH = {"later": "--wide"}
"""


# How many steps each recording was to have.
recorded_steps: list[int] = []


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let recordings take no time: what is chosen is under test. Gives what was recorded, in turn."""
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "job.py").write_text(SCRIPT)
    recorded: list[str] = []
    recorded_steps.clear()

    def record(one: Planted, here: str, number: int, folder: Path, out: Path, steps: int) -> Recorded:
        recorded.append(one.name)
        recorded_steps.append(steps)
        out.mkdir(parents=True)
        at = len(recorded)
        row = Recorded(one.workload, one.name, one.rule, here, "2026-01-02", number, 1e6 * at, torch="2.13", at=10 * at)
        no = "needs a GPU" if one.fault == "never" else "needs a library" if one.workload == "foreign" else ""
        return dataclasses.replace(row, step_ns=0.0, said=no) if no else row

    monkeypatch.setattr(accuracy, "WORKLOADS", tmp_path / "workloads")
    monkeypatch.setattr(accuracy, "machine", lambda: "here")
    monkeypatch.setattr(accuracy, "record", record)
    monkeypatch.setattr(accuracy, "REPORTS", tmp_path / "reports")
    return recorded


def accuracy_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[Recorded]:
    monkeypatch.setattr(sys, "argv", ["accuracy", "--out", str(folder / "out"), *options])
    accuracy.main()
    return summary.recorded(folder / "out")


def test_faults_lie_between_healthy_runs_with_their_options(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = accuracy_of(tmp_path, monkeypatch, "--rounds", "1")
    plain = ["healthy", "late", "never", "healthy"]
    assert done == [*plain, "no fault, --wide", "later", "no fault, --wide", "healthy, --wide"]
    assert [r.healthy_ns for r in rows] == [0, 2e6, 0, 0, 0, 6e6, 0, 0]


def test_a_fault_is_compared_with_the_healthy_step_at_its_time(done: list[str]) -> None:
    def row(name: str, at: float, ns: float, rule: str = "") -> Recorded:
        return Recorded("job", name, rule, "here", "2026-01-02", 0, ns, at=at)

    late = [row("late", at, 9.0, "input_wait") for at in (50, 130, 200, 2000)]
    others = [row("healthy", 160, 7.0), dataclasses.replace(row("healthy", 140, 7.0), machine="there")]
    between = [row("healthy", 100, 1.0), row("healthy", 200, 2.0)]
    wide = [row("later", 90, 9.0, "host_bound"), row("no fault, --wide", 60, 5.0)]
    # Before the first and after the last run the nearest counts; one that is too far off does not.
    assert [r.healthy_ns for r in accuracy.compared([*late, *between, others[1], *wide])] == [
        *(1.0, pytest.approx(1.3), 2.0, 0.0),
        *(0, 0, 0, 5.0, 0),
    ]
    assert accuracy.compared([late[1], *between, *others])[0].healthy_ns == pytest.approx(4.0)


def test_a_second_run_records_what_is_missing_and_a_third_nothing(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracy_of(tmp_path, monkeypatch, "--rounds", "1", "--only", "late")
    assert done == ["healthy", "late", "healthy"]
    accuracy_of(tmp_path, monkeypatch, "--rounds", "2")
    # What cannot be shown here is not tried in another round.
    wide = ["no fault, --wide", "later", "no fault, --wide", "healthy, --wide"]
    assert done[3:9] == ["healthy", "never", *wide]
    assert done[9:] == ["healthy", "late", "healthy", *wide]
    accuracy_of(tmp_path, monkeypatch, "--rounds", "2")
    assert len(done) == 16
    accuracy_of(tmp_path, monkeypatch, "--rounds", "1", "--only", "late", "--again")
    assert done[16:] == ["healthy", "late", "healthy"]


def test_healthy_runs_are_recorded_as_often_as_asked(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracy_of(tmp_path, monkeypatch, "--rounds", "1", "--only", "late", "--healthy", "3")
    assert done == ["healthy", "late", "healthy", "healthy"]
    rows = accuracy_of(tmp_path, monkeypatch, "--rounds", "0", "--healthy", "4")
    assert (done[4:], len(rows)) == (["healthy"], 5)


def test_steps_that_take_long_are_recorded_fewer_times(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    was = [Recorded("job", n, "", "here", "2026-01-01", 0, ns) for n, ns in (("healthy", 2e8), ("late", 9e9))]
    summary.write(tmp_path / "out", was)
    accuracy_of(tmp_path, monkeypatch, "--rounds", "1", "--only", "late", "later", "--again", "--seconds", "20")
    assert done == ["healthy", "late", "healthy", "no fault, --wide", "later", "no fault, --wide"]
    assert recorded_steps == [100, accuracy.LEAST_STEPS, 100, 120, 120, 120]


@pytest.mark.long
def test_kept_runs_are_diagnosed_anew(tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    rows = accuracy_of(tmp_path, monkeypatch, "--rounds", "1", "--only", "late", "--keep", str(kept))
    assert len(list(kept.glob(f"*/{accuracy.ROW}"))) == len(done) == 3
    steps = [runs.light(n, 100 * MS, fetch_ns=40 * MS, forward_ns=30 * MS) for n in range(40)]
    facts = {**runs.CPU, "loaders": [{"role": "train", "num_workers": 2}], "cpu": {"count": 16, "affinity": 16}}
    for folder in kept.iterdir():
        runs.recorded(folder, (None, steps, facts))
    (healthy, late, _) = accuracy_of(tmp_path, monkeypatch, "--kept", str(kept))
    assert len(done) == 3
    assert (healthy.name, late.name, late.rule, late.round) == ("healthy", "late", "input_wait", 0)
    assert [healthy.step_ns, late.step_ns, late.healthy_ns] == [100 * MS] * 3
    assert [found[0] for found in late.found] == ["input_wait"]
    assert late.found[0][1:] == pytest.approx((0.4, 60 * MS))
    assert rows[1].found == ()


def test_faults_of_a_workload_that_does_not_run_are_not_tried(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "workloads" / "foreign.py").write_text('FAULTS = {"late": "input_wait", "later": "host_bound"}')
    rows = accuracy_of(tmp_path, monkeypatch, "--rounds", "2", "--workloads", "foreign")
    assert done == ["healthy"]
    assert [(r.name, r.rule, r.said) for r in rows] == [
        ("healthy", "", "needs a library"),
        ("late", "input_wait", "needs a library"),
        ("later", "host_bound", "needs a library"),
    ]


def test_other_machines_keep_their_rows_and_faults_that_are_gone_do_not(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Recorded("job", "never", "host_sync", "1 × H", "2026-01-01", 0, 2e6, 1e6, torch="2.13")
    gone = dataclasses.replace(there, name="gone")
    (tmp_path / "out").mkdir()
    summary.write(tmp_path / "out", [there, gone])
    rows = accuracy_of(tmp_path, monkeypatch, "--rounds", "1", "--again")
    assert rows[0] == there
    assert {r.name for r in rows} == {"never", "healthy", "healthy, --wide", "no fault, --wide", "late", "later"}
    assert {r.machine for r in rows[1:]} == {"here"}


def test_a_workload_that_ends_with_a_usage_error_tells_why(tmp_path: Path) -> None:
    code, said = accuracy.run([sys.executable, "-c", "import sys; sys.exit('job.py: error: needs a GPU')"], tmp_path)
    assert (code, said) == (1, "job.py: error: needs a GPU\n")


def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "LONGEST_S", 0.5)
    code, said = accuracy.run([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path)
    assert code == 1
    assert "error: ended after" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a warning\nusage: job.py\njob.py: error: --fault late needs a GPU\n", "--fault late needs a GPU"),
        ("a warning\n[rank0]: RuntimeError: no room\nChildFailedError:\n", "[rank0]: RuntimeError: no room"),
        ("job.py needs a library\nChildFailedError:\n", "job.py needs a library"),
        ("", "exit code 3"),
        ("job.py needs a library\nlaunch.errors.ChildFailedError: \nRootError: x", "job.py needs a library"),
    ],
)
def test_what_a_failed_run_says_is_the_line_that_tells_most(words: str, said: str) -> None:
    assert accuracy.reason(words, 3) == said


def test_advice_that_changes_numbers_is_no_false_alarm_of_a_healthy_run(tmp_path: Path) -> None:
    sure = {"state": "found", "share": 0.3, "saving_ns": 30.0, "scope": "step", "changes": [{"numerics": False}]}
    outcomes = [
        {**sure, "id": "fp32_matmul", "changes": [{"numerics": True}]},
        {**sure, "id": "input_wait", "changes": [{"numerics": False}, {"numerics": True}]},
        {**sure, "id": "host_bound", "changes": []},
    ]
    result = {"window": {"step_ns": 100.0}, "run": {"torch": "2"}, "outcomes": outcomes}
    (tmp_path / "result.json").write_text(json.dumps(result))
    healthy = Recorded("job", "healthy", "", "here", "2026-01-01", 0)
    assert [i for i, _, _ in accuracy.diagnosed(healthy, tmp_path, 0, "").found] == ["input_wait", "host_bound"]
    planted = dataclasses.replace(healthy, rule="fp32_matmul")
    assert "fp32_matmul" in [i for i, _, _ in accuracy.diagnosed(planted, tmp_path, 0, "").found]
