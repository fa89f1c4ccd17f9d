"""`dlprof top` on a real job while it runs and after it, in a terminal and without one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlprof.cli import cli
from dlprof.run_folder import RECORDS, lines_of
from tests.fixtures.followed import MS, begin, rank, steps
from tests.fixtures.jobs import DLPROF, environment, launch, rows, spawned, tiny, until, wrapped

# Two epochs, of which the second is not over until somebody says so.
JOB = """
for epoch in range(2):
    for number, batch in enumerate(DataLoader(data, batch_size=8)):
        train(batch)
        time.sleep(0.01)
        if epoch == 1 and number == 4:
            print("trained", flush=True)
            sys.stdin.readline()
"""


@contextmanager
def training(folder: Path) -> Iterator[Any]:
    """Start that job, and wait until it has trained and its steps are on disk; it ends with the block."""
    command = wrapped(folder / "run", [sys.executable, tiny(folder, JOB)], "--no-trace", "--stacks", "off")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with spawned(command, env=environment(), **pipes) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        assert job.stdout.readline() == "trained\n"
        rank = folder / "run" / "ranks" / "00000"
        assert until(lambda: (rank / RECORDS).exists() and len(lines_of(rank, "steps")) >= 12)
        yield job
        job.stdin.write("\n")
        job.stdin.flush()


@contextmanager
def terminal(folder: Path, *words: str) -> Iterator[tuple[Any, Any]]:
    """Run a command in a terminal of its own; yield its process, and a function that types and waits for a text."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    os.set_blocking(ours, False)
    seen = ""

    def typed(keys: str, expected: str) -> bool:
        nonlocal seen
        seen = ""
        os.write(ours, keys.encode())

        def there() -> bool:
            nonlocal seen
            try:
                seen += os.read(ours, 1 << 16).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
            return expected in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)

        return until(there)

    env = environment(TERM="xterm", LANG="C.UTF-8")
    try:
        with spawned([*DLPROF, *words], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
            yield process, typed
    finally:
        os.close(ours)
        os.close(theirs)


def top(run: Path) -> Result:
    return CliRunner().invoke(cli, ["top", str(run)])


def figures(run: Path) -> Any:
    done = launch([*DLPROF, "top", "--format", "json", str(run)], run.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def by_hand(run: Path) -> dict[str, float]:
    """Return what the step log of rank 0 says, summed up here."""
    trained = [row for row in rows(run / "ranks" / "00000") if row["kind"] == "train"]
    steady, last = ([row for row in of if not row["first"] | row["profiled"]] for of in (trained, trained[-20:]))
    names = ("fetch_ns", "lead_ns", "forward_ns", "backward_ns", "optimizer_ns")
    parts = {name[:-3]: sum(row[name] for row in last) / len(last) / 1e9 for name in names}
    step_s = sum(row["dur_ns"] for row in last) / len(last) / 1e9
    return {
        "mean_s": sum(row["dur_ns"] for row in steady) / len(steady) / 1e9,
        "step_s": step_s,
        "samples_per_s": 8 / step_s,
        "rest": step_s - sum(parts.values()),
        **parts,
    }


@pytest.mark.long
def test_a_job_that_runs_and_then_has_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(tmp_path) as job:
        frame = launch([*DLPROF, "top", "--once"], tmp_path, env=environment()).stderr
        assert frame.startswith("dlprof: there is no run in ./runs")
        frame = launch([*DLPROF, "top", "--once", str(run)], tmp_path).stdout
        assert "running for" in frame
        assert "epoch 2, step 4 of 8" in frame
        running, expected = figures(run), by_hand(run)
        assert (running["state"], running["epoch"]["step"], running["rank_count"]) == ("running", 4, 1)
        with terminal(tmp_path, "top", "run") as (process, typed):
            assert typed("", "by rank")
            assert typed("s", "by step time")
            assert typed("s", "by fetch")
            assert typed("p", "paused")
            assert typed("r", "report: run/report.html")
            assert (run / "report.html").is_file()
            assert typed("q", "")  # the screen is left, without another line
            assert process.wait(60) == 0
    assert job.returncode == 0
    ended = figures(run)
    assert (ended["state"], ended["exit"]["code"], ended["still_s"], ended["epoch"]) == ("ended", 0, None, {})
    for found, wanted in ((running, expected), (ended, by_hand(run))):
        of_rank = {**found["ranks"][0], **found["ranks"][0]["parts_s"]}
        assert {name: of_rank[name] for name in wanted} == pytest.approx(wanted)
    frame = launch([*DLPROF, "top", str(tmp_path)], tmp_path).stdout  # it holds one run
    assert "ended with exit code 0" in frame
    assert "\x1b" not in frame


def test_hostile_names_draw_nothing_of_their_own(tmp_path: Path) -> None:
    run = begin(tmp_path / "[red]x", command=["python", "\x1b[2J[bold]train.py", "\u202e"])
    folder = rank(run, 0, steps(5), {"host": "\x1b]0;title\x07[/bold]"}).parent
    (folder / "stalls.jsonl").write_text(
        json.dumps({"kind": "\x1b[31m[/]", "dur_ns": "x", "path": "[/red]\n\x1b[2J", "step": {}, "start_ns": "9"})
    )
    (folder / "stalls.jsonl").open("a").write("\n")
    (run / "hosts" / "\x1b[7m").mkdir(parents=True)
    (run / "hosts" / "\x1b[7m" / "host.jsonl").write_text('{"cpu_share": 1e300, "memory_used_bytes": "x"}\n')
    done = top(run)
    assert (done.exit_code, done.stderr) == (0, "")
    assert not any(char in done.stdout for char in ("\x1b", "\x07", "\u202e"))
    assert "[red]x" in done.stdout
    assert "stall of rank 0" in done.stdout


def test_many_ranks_are_outliers_and_their_number(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    for number in range(100):
        rank(run, number, steps(3, 10 * MS, lead_ns=6 * MS if number == 71 else 0))
    frame = top(run).stdout
    assert "16 of 100 ranks" in frame
    assert re.search(r"^ +71 ", frame, re.MULTILINE)
    assert "wait for rank 71" in frame


STATES = [
    ({}, 0.0, "running for"),
    ({}, 40.0, "→ dlprof hang "),
    ({"end_ns": 1, "exit": {"code": None, "signal": 9}}, 0.0, "ended by signal 9"),
    ({"end_ns": 1, "exit": None}, 0.0, "ended with exit code None"),
]


@pytest.mark.parametrize(("about", "ago_s", "said"), STATES)
def test_the_state_is_in_the_second_line(about: dict[str, Any], ago_s: float, said: str, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", **about)
    rank(run, 0, steps(5, ago_s=ago_s))
    assert said in top(run).stdout.splitlines()[1]


@pytest.mark.parametrize("path", ["nowhere", "empty", "file"])
def test_what_is_no_run_is_one_line(path: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    done = top(tmp_path / path)
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
