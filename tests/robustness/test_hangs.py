"""Jobs that come to stand still: why is said once, by the run and by `dlprof hang`, whoever has started their ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dlprof.read.run import open_run
from dlprof.record.launch import watching
from dlprof.record.launch.watching import processes_of
from tests.fixtures.jobs import (
    COMPILES_NOTHING,
    DLPROF,
    TORCHRUN,
    environment,
    free_port,
    launch,
    spawned,
    until,
    words,
    wrapped,
)

pytest.importorskip("torch", reason="recording needs torch")


# What rank 1 does, and what must be said of it. A rank that is gone is not among them: gloo
# breaks the connection, and all end.
WAITS = r"Rank 0 waits in all_reduce \(planted.py:{}\) for rank 1, which "
PLANTED = COMPILES_NOTHING + Path(__file__).with_name("planted.py").read_text()
LINES = PLANTED.splitlines()


def at(text: str, nth: int = 0) -> int:
    """Return the number of the n-th line of the planted script that holds a text."""
    return [n for n, line in enumerate(LINES, 1) if text in line][nth]


REDUCE, BARRIER = at("dist.all_reduce(weight)"), at("dist.barrier()")
HANGS = {
    "skipped": rf"The ranks disagree: rank 0 is in all_reduce \(planted.py:{REDUCE}\); rank 1 is in barrier"
    rf" \(planted.py:{BARRIER}\)",
    "branch": rf"The ranks disagree: rank 0 is in all_reduce \(planted.py:{REDUCE}\); rank 1 is in broadcast"
    rf" \(planted.py:{at('dist.broadcast')}\)",
    "uneven": rf"The ranks disagree: rank 0 is in all_reduce \(planted.py:{REDUCE}\); rank 1 is in barrier"
    rf" \(planted.py:{BARRIER}\)",
    "waited": rf"The ranks disagree: rank 0 is in .wait\(\) \(planted.py:{at('work.wait()')}\); rank 1 is in barrier"
    rf" \(planted.py:{BARRIER}\)",
    "lock": WAITS
    + rf"waits for a lock, or another thread or process \(planted.py:{at('lock.acquire()', 1)}: .*\), which"
    rf" it holds already, since planted.py:{at('lock.acquire()')}",
    "stopped": WAITS + rf"is stopped \(SIGSTOP, or a debugger\) at planted.py:{at('signal.SIGSTOP', 1)}\.",
    "worker_stopped": WAITS + r"waits for its loader \(planted.py:\d+: for .*\): its loader worker \(process \d+\) is"
    r" stopped",
    "worker_slow": WAITS + r"waits for its loader \(planted.py:\d+: for .*\): 1 worker of 1 is in"
    rf" planted.py:{at('time.sleep(10_000)')}: time.sleep\(10_000\), idle",
    "busy": WAITS + rf"runs Python \(planted.py:{at('sum(range')}: .*\), and is busy",
    "joining": rf"Rank 0 waits in init_process_group \(planted.py:{at('dist.init_process_group')}\) for rank 1, which"
    rf" runs Python \(planted.py:{at('time.sleep(10_000)', 2)}: .*\), and is idle",
    "raised": WAITS + rf"handles ValueError \(planted.py:{at('raise ValueError')}\), and is in barrier"
    rf" \(planted.py:{BARRIER + (at('dist.barrier()', 1) - BARRIER)}: ",
}


def planted(folder: Path) -> Path:
    """Write the script."""
    script = folder / "planted.py"
    script.write_text(PLANTED)
    return script


@contextmanager
def standing(folder: Path, kind: str, launcher: str, env: dict[str, str], cwd: Path | None = None) -> Iterator[Any]:
    """Start a job that will stand still, recorded into folder/run; wait until that was said. Yield what was said."""
    script = [str(planted(folder)), kind, launcher]
    command = wrapped(folder / "run", [sys.executable, *(TORCHRUN if launcher == "torchrun" else ()), *script])
    at = command.index("--no-report")
    command[at:at] = ["--hang", "1", "--no-trace", "--no-sample"]
    command = ["srun", "-n", "2", *command] if launcher == "srun" else command
    said = folder / "said.txt"
    env = env | {"PLANTED_STORE": str(folder / "store")}
    with said.open("w") as out, spawned(command, env=env, cwd=cwd or folder, stdout=out, stderr=out) as job:
        assert until(lambda: "asks again" in said.read_text() or job.poll() is not None), said.read_text()
        try:
            yield said
        finally:
            for pid in processes_of(job.pid, folder / "run"):
                if "dlprof" not in words(pid):
                    os.kill(pid, signal.SIGKILL)


def told(said: Path) -> list[str]:
    """Return the lines that were printed of the standstill, in order, without dlprof's name."""
    return [line.partition("dlprof:   ")[2] for line in said.read_text().splitlines() if "dlprof:   " in line]


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [
        pytest.param(
            kind,
            launcher,
            marks=pytest.mark.long if (kind, launcher) == ("raised", "spawn") else pytest.mark.slow,
        )
        for launcher in ("torchrun", "spawn")
        for kind in HANGS
    ],
)
def test_why_a_job_stands_still(kind: str, launcher: str, tmp_path: Path) -> None:
    with standing(tmp_path, kind, launcher, environment()) as said:
        first, *_ = told(said)
        assert re.match(HANGS[kind].format(REDUCE), first), told(said)
        asked = launch([*DLPROF, "hang", "--format", "json", str(tmp_path / "run")], tmp_path)
        found = json.loads(asked.stdout)
        assert (found["why"], [one["rank"] for one in found["ranks"]]) == (first, [0, 1])
        assert found["blamed"] == [1] or "disagree" in first
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert [one["why"] for one in run["hangs"]] == [first]
    assert [w for w in open_run(tmp_path / "run").warnings if w.endswith(first)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HANGS)
def test_ranks_of_srun_that_stand_still(kind: str, tmp_path: Path, slurm: dict[str, str]) -> None:
    with standing(tmp_path, kind, "srun", slurm) as said:
        assert any(re.match(HANGS[kind].format(REDUCE), line) for line in told(said)), said.read_text()


@pytest.mark.slow
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "x", str(full)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root can make a disk that is full")
    try:
        with standing(tmp_path, "disk", "torchrun", environment(), full) as said:
            first, second, *_ = told(said)
        pattern = (
            WAITS + rf"handles OSError: (\[Errno 28\] )?No space left on device \(planted.py:{at('write_bytes')}\)"
        )
        assert re.match(pattern.format(REDUCE), first)
        assert second == f"The disk of {full} is full."
    finally:
        subprocess.run(["umount", "-l", str(full)], check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least_s", "most_s"), [("lock", 2.0, 9.0), ("saving", 10.0, 40.0)])
def test_ranks_at_work_have_more_time(
    kind: str, least_s: float, most_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "seconds", lambda _asked, _mean_s: 2.0)
    monkeypatch.setattr(watching, "_SELDOM_S", 0.5)
    monkeypatch.setattr(watching, "_LOOK_S", 0.5)
    run = tmp_path / "run"
    command = wrapped(run, [sys.executable, *TORCHRUN, str(planted(tmp_path)), kind, "torchrun"])
    place = command.index("--no-report")
    command[place:place] = ["--hang", "off", "--no-trace", "--no-sample"]
    env = environment(PLANTED_STORE=str(tmp_path / "store"))
    with spawned(command, env=env, cwd=tmp_path) as job:
        assert until(lambda: len(list(run.glob("ranks/*/records.jsonl"))) == 2)
        watch = watching.Watch("auto", run, env)
        watch.start()
        try:
            assert until(lambda: watch.reports)
        finally:
            watch.end()
            for pid in processes_of(job.pid, run):
                if "dlprof" not in words(pid):
                    os.kill(pid, signal.SIGKILL)
    (report,) = watch.reports
    assert least_s <= report["still_s"] <= most_s
    assert "rank 1" in report["why"]


# What host a says of rank 1, which is on host b and answers itself, over the disk.
FAR = {
    "lock": r"Rank 0 waits in all_reduce \(planted.py:{}\) for rank 1 on b, which waits for a lock, or another thread"
    rf" or process \(planted.py:{at('lock.acquire()', 1)}: ",
    "busy": r"Rank 0 waits in all_reduce \(planted.py:{}\) for rank 1 on b, which runs Python"
    rf" \(planted.py:{at('sum(range')}: .*\), and is busy",
    "branch": HANGS["branch"],
    "raised": r"Rank 0 waits in all_reduce \(planted.py:{}\) for rank 1 on b, which handles ValueError"
    rf" \(planted.py:{at('raise ValueError')}\), and is in barrier",
    "stopped": WAITS + r"could not be looked at: it is on b, and has not answered",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAR)
def test_ranks_of_two_hosts_are_told_in_one_sentence(kind: str, tmp_path: Path) -> None:
    # Namespaces, so that neither host sees the other's processes, nor has its name.
    host = ["unshare", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
    if subprocess.run([*host, "hostname", "a"], check=False, capture_output=True).returncode:
        pytest.skip("only root can make two hosts of one")
    ends = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    env = environment(GLOO_SOCKET_IFNAME="lo", PLANTED_STORE=str(tmp_path / "store"))
    said = [tmp_path / name for name in "ab"]
    with ExitStack() as jobs:
        for n, file in enumerate(said):
            torchrun = [sys.executable, "-m", "torch.distributed.run", *ends, "--node-rank", str(n)]
            command = wrapped(tmp_path / "run", [*torchrun, str(planted(tmp_path)), kind, "torchrun"])
            place = command.index("--no-report")
            command[place:place] = ["--job", "two", "--hang", "1", "--no-trace", "--no-sample"]
            on_host = [*host, "sh", "-c", f"hostname {file.name}; exec {shlex.join(command)}"]
            out = jobs.enter_context(file.open("w"))
            job = jobs.enter_context(spawned(on_host, env=env, cwd=tmp_path, stdout=out, stderr=out))
            jobs.callback(job.kill)
        assert until(lambda: "asks again" in said[0].read_text()), said[0].read_text()
        first, *_ = told(said[0])
        assert re.match(FAR[kind].format(REDUCE), first), told(said[0])
