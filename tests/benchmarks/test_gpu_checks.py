"""The command itself: every check is there, none costs another its row, and a cut-off run brings home what it has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import cases, checks, faults, jobs, outcome, page
from benchmarks.gpu.__main__ import chosen, scripts_left, unchecked
from benchmarks.gpu.outcome import Row, holds, skipped
from dlprof.commands.run import constant, workloads
from tests.fixtures.jobs import is_running

# Checks as a module of its own lists them. What they do to get out of hand is real; the figures are none.
MODULE = """
import os, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu.checks import Check
from benchmarks.gpu.outcome import holds, skipped

def fine(bench):
    bench.add(holds("one", True, ""), skipped("two", "one GPU"), anywhere=True)

def wrong(bench):
    bench.add(holds("one", True, ""), holds("three", False, f"in {Path.cwd()}"), anywhere=True)

def breaks(bench):
    bench.add(holds("before", True, ""), anywhere=True)
    raise RuntimeError("a check with a mistake")

def dies(bench):
    os.kill(os.getpid(), 11)

def hangs(bench):
    bench.add(holds("before", True, ""), anywhere=True)
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(os.environ["LEFT"]).write_text(str(child.pid))
    time.sleep(300)

CHECKS = (
    Check("fine", "", fine, 60, 1),
    Check("wrong", "", wrong, 60, 1),
    Check("breaks", "", breaks, 60, 1),
    Check("dies", "", dies, 60, 1),
    Check("hangs", "", hangs, 4, 1),
    Check("long", "", fine, 600, 500, reserved_s=1),
)
"""


def command(tmp_path: Path, *options: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs the checks of MODULE, and its environment."""
    (tmp_path / "made_up_checks.py").write_text(MODULE)
    words = ["-m", "benchmarks.gpu", "--rehearse", "--checks", "made_up_checks", "--out", str(tmp_path / "out")]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{jobs.ROOT}", "LEFT": str(tmp_path / "left")}
    return [sys.executable, *words, *options], env


def told(tmp_path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((tmp_path / "out" / "rehearsal-gpu.json").read_text())
    return data


@pytest.mark.long
def test_what_breaks_dies_or_hangs_costs_its_own_row(tmp_path: Path) -> None:
    words, env = command(tmp_path, "--minutes", "2")
    done = subprocess.run(words, cwd=jobs.ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    data = told(tmp_path)
    rows = {row["check"]: row for row in data["checks"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "fine": "rehearsed",
        "wrong": "failed",
        "breaks": "failed",
        "dies": "failed",
        "hangs": "failed",
        "long": "skipped",
    }
    assert rows["breaks"]["why"] == "RuntimeError: a check with a mistake"
    assert [part["name"] for part in rows["breaks"]["parts"]] == ["before"]
    assert [part["name"] for part in rows["hangs"]["parts"]] == ["before"]
    assert "not done" in rows["hangs"]["why"]
    assert "no time left" in rows["long"]["why"]
    assert not is_running(int((tmp_path / "left").read_text()))
    # Nothing that was rehearsed lies where results do, and where it ran is told in none of it.
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"rehearsal-gpu.json", "rehearsal-README.md", "rehearsal-log.txt"}
    assert all(str(jobs.ROOT) not in path.read_text() for path in (tmp_path / "out").iterdir())
    # The end of the log says what failed and why.
    assert any("FAILED breaks: RuntimeError" in text for text in done.stdout.splitlines()[-6:])
    assert data["rehearsal"] is True


def test_a_run_that_is_cut_off_leaves_what_it_has_and_nothing_running(tmp_path: Path) -> None:
    words, env = command(tmp_path, "--only", "fine", "hangs", "--minutes", "2")
    with subprocess.Popen(words, cwd=jobs.ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "left").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        # A check that has not ended stands as such in what is there already.
        assert [row["state"] for row in told(tmp_path)["checks"]] == ["rehearsed", "running"]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 1
    states = {row["check"]: (row["state"], row["why"]) for row in told(tmp_path)["checks"]}
    assert states == {"fine": ("rehearsed", states["fine"][1]), "hangs": ("failed", "interrupted")}
    assert not is_running(int((tmp_path / "left").read_text()))


# What one call on a lent machine runs after the check `advice`.
LATER = ("overhead", "calls", "tests", "faults", "ranks", "copies")


def test_every_row_of_the_specification_has_a_check() -> None:
    names = [check.name for check in checks.CHECKS]
    wanted = {"doctor", "tests", "async", "sync", "overhead", "calls", "modes", "product", "copies", "settings"}
    assert set(names) == wanted | {"placement", "ranks", "advice", "faults"}
    assert len(names) == len(set(names))
    for check in checks.CHECKS:
        assert check.passes
        assert 0 < check.least_s <= check.budget_s
    # What takes whatever time there is comes last, and leaves some to those that are asked for after it.
    assert names[-2:] == ["advice", "faults"]
    assert all(c.reserved_s >= c.least_s for c in checks.CHECKS if c.name in LATER)


def test_a_name_that_no_check_has_is_told_with_those_there_are() -> None:
    assert [check.name for check in chosen(checks.CHECKS, ["ranks", "doctor", "ranks"])] == ["ranks", "doctor"]
    assert "ranks" not in [check.name for check in chosen(checks.CHECKS, None, ["ranks"])]
    with pytest.raises(ValueError, match=r"no check rank; there are: doctor, async"):
        chosen(checks.CHECKS, ["rank"])


def test_every_fault_of_every_workload_is_planted_or_said_why_not() -> None:
    planted = {(group.workload, fault) for group in faults.GROUPS for fault in group.faults}
    known = {(script.stem, fault) for script in workloads() for fault in constant(script, "FAULTS") or {}}
    elsewhere = {(w, f) for w, f in known if (w, f) in faults.ELSEWHERE or (w, "*") in faults.ELSEWHERE}
    assert planted | elsewhere == known
    assert not planted & elsewhere


@pytest.mark.parametrize("group", faults.GROUPS, ids=lambda group: f"{group.workload}{group.options}")
def test_a_workload_takes_the_options_of_its_group(group: faults.Group) -> None:
    script = jobs.ROOT / "workloads" / f"{group.workload}.py"
    text = script.read_text() + (script.parent / "parts" / "job.py").read_text()
    options = [word for word in group.options.split() if word.startswith("--")]
    options += ["--log-every"] * group.lines + ["--steps", "--device", "--fault"]
    assert [option for option in options if f'"{option}"' not in text] == []
    # A fault that needs options to cost more than a little has them.
    shown = constant(script, "SHOWN_WITH") or {}
    for fault in group.faults:
        missing = [w for w in str(shown.get(fault, "")).split() if w.startswith("--") and w not in group.options]
        assert not missing or group.workload in ("bert_pretrain", "fsdp_gpt"), (fault, missing)


def test_what_was_left_out_is_told_by_its_reason() -> None:
    parts = (skipped("a", "one GPU"), skipped("b", "one GPU"), skipped("c", "no compiler"))
    assert unchecked([Row("x", "passed", parts=parts)]) == [
        "not checked: x: a, b: one GPU",
        "not checked: x: c: no compiler",
    ]


def test_scripts_that_an_earlier_call_judged_are_left_out(tmp_path: Path) -> None:
    everything = [case.script for case in cases.CASES]
    assert scripts_left([], None) == everything
    assert scripts_left(["metrics", "decode"], None) == ["metrics", "decode"]
    parts = [
        holds("metrics: gain", True, ""),
        holds("metrics: cause", False, "x"),
        skipped("decode: gain", "no time left"),
    ]
    row = outcome.to_json(outcome.row_of("advice", parts))
    (tmp_path / "gpu.json").write_text(json.dumps({"checks": [row]}))
    assert scripts_left([], tmp_path) == [name for name in everything if name != "metrics"]
    assert scripts_left(["metrics", "decode"], tmp_path) == ["decode"]
    with pytest.raises(ValueError, match="no script metric; there are: ema_loop"):
        scripts_left(["metric"], None)
    with pytest.raises(FileNotFoundError):
        scripts_left([], tmp_path / "nowhere")


def call(machine: str, commit: str, took_s: float, **states: str) -> dict[str, Any]:
    rows = [{"check": name, "state": state, "why": commit, "parts": []} for name, state in states.items()]
    passes = dict.fromkeys(("doctor", "async", "faults", "advice"), "")
    return {
        "format": 1,
        "rehearsal": False,
        "at": "now",
        "commit": commit,
        "took_s": took_s,
        "passes": passes,
        "machine": {"gpus": [machine], "driver": "1", "cuda": "1", "torch": "2", "python": "3", "nccl": "2"},
        "checks": rows,
    }


def test_several_calls_become_one_page(tmp_path: Path) -> None:
    first = call("H200", "aaa", 500, doctor="passed", async_="failed", faults="skipped")
    second = call("H200", "bbb", 400, async_="skipped", faults="passed")
    for data in (first, second):
        for row in data["checks"]:
            row["check"] = row["check"].rstrip("_")
    one = page.merged([first, second])
    assert [(row["check"], row["state"], row["why"]) for row in one["checks"]] == [
        ("doctor", "passed", "aaa"),
        ("async", "failed", "aaa"),
        ("faults", "passed", "bbb"),
    ]
    assert (one["commit"], one["took_s"]) == ("aaa, bbb", 900)
    with pytest.raises(ValueError, match="different machines"):
        page.merged([first, call("H100", "bbb", 1, doctor="passed")])
    with pytest.raises(ValueError, match="rehearsal"):
        page.merged([{**first, "rehearsal": True}])
    for n, data in enumerate((first, second)):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / "gpu.json").write_text(json.dumps(data))
        (folder / "recordings-h200-1.tar.gz").write_bytes(str(n).encode())
        (folder / "log.txt").write_text(f"call {n}\n")
    words = [sys.executable, "-m", "benchmarks.gpu.page", tmp_path / "to", tmp_path / "0", tmp_path / "1"]
    subprocess.run(list(map(str, words)), cwd=jobs.ROOT, check=True, timeout=60)
    found = {path.name: path.read_bytes() for path in (tmp_path / "to").glob("*.tar.gz")}
    assert found == {"recordings-h200-1.tar.gz": b"0", "recordings-h200-2.tar.gz": b"1"}
    assert json.loads((tmp_path / "to" / "gpu.json").read_text()) == one
    assert (tmp_path / "to" / "log.txt").read_text() == "call 0\n\ncall 1\n"


def test_of_the_scripts_that_calls_divide_each_has_its_latest_line() -> None:
    def advice(*parts: outcome.Part) -> dict[str, Any]:
        return {**call("H200", "aaa", 1), "checks": [outcome.to_json(outcome.row_of("advice", parts))]}

    gain = outcome.Part("a: gain", "passed", true="2.00 → 1.00 ms (2.00 ×)")
    after = outcome.Part("a: step after", "skipped", "another change", said=9.0, unit="ms")
    first = advice(gain, holds("a: cause", False, "x"), holds("b: gain", True, ""), skipped("c: gain", "no time left"))
    second = advice(
        gain,
        after,
        outcome.among("a: line", 7, [7], how=""),
        skipped("b: gain", "no time left"),
        skipped("d: gain", "y"),
    )
    (row,) = page.merged([first, second])["checks"]
    assert [part["name"] for part in row["parts"]] == [
        "b: gain",
        "c: gain",
        "a: gain",
        "a: step after",
        "a: line",
        "d: gain",
    ]
    assert row["state"] == "passed"
    text = page.render({**first, "checks": [row]}, [])
    assert "| a | passed | 2.00 → 1.00 ms (2.00 ×) |  | 7 |" in text
    assert "| *9 ms* |" in text
    assert "All is right in 2 of 2 scripts" in text
    assert "- c: gain: not run: no time left" in text
    wrong = page.render(first, [])
    assert "| a | **failed** | 2.00 → 1.00 ms (2.00 ×) | **no**: x |" in wrong
    assert "All is right in 1 of 2 scripts" in wrong


def test_the_page_names_what_was_never_run() -> None:
    data = call("H200", "aaa", 500, doctor="passed")
    assert "- never run: async, faults, advice\n" in page.render(data, [])
    assert "never run" not in page.render({**data, "passes": {"doctor": ""}}, [])
