"""The host's sampler tells what the kernel counts of real processes: of a rank, and apart, of those it started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlprof.record.samplers.host import HostSampler, _waited
from dlprof.record.samplers.sampling import Host
from tests.fixtures.jobs import until
from tests.fixtures.sampling import leave_word

# A rank that sleeps and a worker that computes; a line to stdin ends the worker, the next one the rank.
RANK = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(worker.pid, flush=True)
sys.stdin.readline()
worker.kill()
worker.wait()
print("ended", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    folder = tmp_path / "ranks" / "00003"
    folder.mkdir(parents=True)
    (folder / "facts.json").write_text(json.dumps({"rank": 3, "host": os.uname().nodename, "pid": process.pid}))
    leave_word(tmp_path, folder.name, process.pid)
    yield process
    process.communicate("\n\n", timeout=30)


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_rank_and_its_workers_are_told_apart(tmp_path: Path, rank: subprocess.Popen[str]) -> None:
    host = Host(tmp_path)
    host.folder.mkdir(parents=True, exist_ok=True)
    sampler = HostSampler()
    sampler.start(host)
    assert rank.stdout is not None
    worker = int(rank.stdout.readline())

    def read() -> dict[str, Any]:
        host.look()
        sampler.tick()
        return rows(tmp_path / "ranks/00003/processes.jsonl")[-1]

    first = read()
    burnt = cpu_s(worker)
    assert until(lambda: cpu_s(worker) > burnt + 0.2)
    second = read()
    assert (first["children"], second["children"]) == (1, 1)
    assert second["children_cpu_s"] - first["children_cpu_s"] > 0.15
    assert second["cpu_s"] - first["cpu_s"] < 0.1
    assert second["rss_bytes"] > 1 << 20
    assert second["threads"] == 1
    assert second["perf_ns"] > first["perf_ns"]

    assert rank.stdin is not None
    rank.stdin.write("\n")
    assert rank.stdout.readline() == "ended\n"
    third = read()
    assert third["children"] == 0
    # What a worker used stays used when it ends.
    assert third["children_cpu_s"] >= second["children_cpu_s"]

    rank.stdin.write("\n")
    rank.wait(30)
    lines = len(rows(tmp_path / "ranks/00003/processes.jsonl"))
    host.look()
    sampler.tick()
    assert len(rows(tmp_path / "ranks/00003/processes.jsonl")) == lines
    sampler.stop()


def test_the_host_is_told_as_the_kernel_counts(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.folder.mkdir(parents=True, exist_ok=True)
    sampler = HostSampler()
    sampler.start(host)
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert until(lambda: cpu_s(spinning.pid) > 0.3)
        sampler.tick()
    finally:
        spinning.kill()
        spinning.wait()
    (row,) = rows(host.folder / "host.jsonl")
    assert len(row["core_percent"]) == os.cpu_count()
    assert max(row["core_percent"]) > 0
    assert 0 < row["cpu_share"] <= 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < row["memory_used_bytes"] < total
    assert 0 < row["memory_used_bytes"] + row["memory_available_bytes"] <= total * 1.01
    assert row["page_faults"] > 0
    assert row["runnable_threads"] >= 1


def test_what_the_job_used_holds_what_has_ended(tmp_path: Path, rank: subprocess.Popen[str]) -> None:
    """A rank's worker is a process of the job, and what it used stays used when the rank has waited for its end."""
    host = Host(tmp_path)
    host.folder.mkdir(parents=True, exist_ok=True)
    sampler = HostSampler()
    sampler.start(host)
    sampler._supervisor = rank.pid  # and not whoever started the tests
    assert rank.stdout is not None
    assert rank.stdin is not None
    worker = int(rank.stdout.readline())
    assert until(lambda: cpu_s(worker) > 0.3)

    def read() -> dict[str, Any]:
        host.look()
        sampler.tick()
        return rows(host.folder / "host.jsonl")[-1]

    assert "job_cpu_s" not in read()  # its processes were not looked for yet
    first = read()["job_cpu_s"]
    assert first > 0.25
    assert until(lambda: cpu_s(worker) > 0.8)
    burnt = cpu_s(worker)
    rank.stdin.write("\n")
    assert rank.stdout.readline() == "ended\n"
    assert read()["job_cpu_s"] > burnt - 0.05


def test_the_waiting_of_a_pools_threads_is_counted_beside_the_main_ones(tmp_path: Path) -> None:
    """Two threads more than cores, and none of them the main one, which sleeps."""
    spin = "import threading, hashlib, time, os\ndef work():\n    while True: hashlib.sha256(bytes(1 << 20))\n"
    spin += "for _ in range((os.cpu_count() or 1) + 2): threading.Thread(target=work, daemon=True).start()\n"
    spin += "print('on', flush=True)\ntime.sleep(60)\n"
    spinning = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, text=True)
    try:
        assert spinning.stdout is not None
        assert spinning.stdout.readline() == "on\n"
        threads = (os.cpu_count() or 1) + 3
        assert until(lambda: _waited(spinning.pid, threads).get("other_threads_waited_ns", 0) > 200_000_000)
        waited = _waited(spinning.pid, threads)
        assert waited["main_thread_waited_ns"] < waited["other_threads_waited_ns"]
        # Of a process with very many threads only the main one is read.
        assert list(_waited(spinning.pid, 10_000)) == ["main_thread_waited_ns"]
    finally:
        spinning.kill()
        spinning.wait()
    assert _waited(2**22 + 1, 1) == {}


def test_an_hour_of_a_large_host_stays_small(tmp_path: Path, rank: subprocess.Popen[str]) -> None:
    """128 cores, 8 ranks and a line a second: below 50 MB an hour, as the whole folder of a rank may be."""
    host = Host(tmp_path)
    host.folder.mkdir(parents=True, exist_ok=True)
    sampler = HostSampler()
    sampler.start(host)
    host.look()
    sampler.tick()
    (row,) = rows(host.folder / "host.jsonl")
    of_host = len(json.dumps(row | {"core_percent": [100] * 128}, separators=(",", ":")))
    of_rank = (tmp_path / "ranks/00003/processes.jsonl").stat().st_size
    assert 3600 * (of_host + 8 * (of_rank + 40)) < 50e6
