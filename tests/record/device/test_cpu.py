"""What the kernel says of the processor, and counts of this process; None or −1 where it does not say."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.device import cpu
from dlprof.record.device.cpu import KernelCounters, used_between
from tests.fixtures.jobs import until

UNKNOWN = -1
XEON = "processor\t: 0\nmodel name\t: Intel Xeon\nflags\t\t: fpu fma avx2 avx512f avx512_bf16 amx_tile amx_bf16\n\n"
VECTORS = ["avx2", "avx512_bf16", "avx512f", "fma"]
TILES = ["amx_bf16", "amx_tile"]


@pytest.mark.parametrize(
    ("text", "tiles", "name", "units"),
    [
        # The first core stands for all.
        (f"{XEON}processor\t: 1\nmodel name\t: another\nflags\t\t: fpu\n\n", True, "Intel Xeon", TILES + VECTORS),
        (XEON, False, "Intel Xeon", VECTORS),  # the kernel does not grant the tiles
        (XEON, None, "Intel Xeon", TILES + VECTORS),  # an older torch does not know
        ("processor\t: 0\nFeatures\t: fp asimdhp i8mm sve\n\n", None, None, ["asimdhp", "i8mm", "sve"]),  # Arm
        ("processor\t: 0\n\n", None, None, None),
    ],
)
def test_the_first_cores_name_and_units(
    text: str, tiles: bool | None, name: Any, units: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    first = cpu._first_core.__wrapped__(str(tmp_path / "cpuinfo"))
    monkeypatch.setattr(cpu, "_first_core", lambda: first)
    answers = {} if tiles is None else {"_is_amx_tile_supported": lambda: tiles}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=SimpleNamespace(**answers)))
    assert cpu.name() == (name or os.uname().machine)
    assert cpu.units() == units


def test_this_machine_answers() -> None:
    quota = cpu.quota()
    assert quota is None or quota > 0
    assert cpu.name()
    assert cpu.cores() == cpu.listed(os.sched_getaffinity(0))
    assert [cpu.listed(n) for n in ([3, 0, 1, 2, 8], [5], [0, 1])] == ["0-3,8", "5", "0-1"]


def test_the_nodes_of_a_host_and_of_a_device(tmp_path: Path) -> None:
    for node, cores in (("node0", "0-15"), ("node1", "16-31")):
        (tmp_path / "nodes" / node).mkdir(parents=True)
        (tmp_path / "nodes" / node / "cpulist").write_text(f"{cores}\n")
    assert cpu.nodes(str(tmp_path / "nodes")) == {"0": "0-15", "1": "16-31"}
    assert cpu.nodes(str(tmp_path / "none")) == {}
    for pci, number in (("0000:c1:00.0", "1"), ("0000:c2:00.0", "0"), ("0000:01:00.0", "-1")):
        (tmp_path / pci).mkdir()
        (tmp_path / pci / "numa_node").write_text(f"{number}\n")
    found = [cpu.node_of(pci, str(tmp_path)) for pci in ("0000:c1:00.0", "0000:c2:00.0", "0000:01:00.0", None)]
    assert found == [1, 0, None, None]


@pytest.mark.parametrize(
    ("process", "limits", "least"),
    [
        ("0::/slurm/job_1/step_0\n", {"slurm": "max", "slurm/job_1": "3000", "slurm/job_1/step_0": "max"}, 3000),
        ("0::/a/b\n", {"a": "2000", "a/b": "3000"}, 2000),
        # Version 1 has a tree of its own, and writes a huge number where there is no limit.
        ("5:cpu,cpuacct:/a\n4:memory:/a\n", {"a": "7", "memory/a": "9223372036854771712"}, None),
        ("4:memory:/a\n", {"memory/a": "9223372036854771712", "memory": "5000"}, 5000),
    ],
)
def test_the_memory_of_a_process_is_the_least_that_its_groups_grant(
    process: str, limits: dict[str, str], least: int | None, tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(process)
    for group, text in limits.items():
        (tmp_path / "groups" / group).mkdir(parents=True, exist_ok=True)
        name = "memory.limit_in_bytes" if group.startswith("memory") else "memory.max"
        (tmp_path / "groups" / group / name).write_text(f"{text}\n")
    assert cpu.memory_limit(str(tmp_path / "cgroup"), str(tmp_path / "groups")) == least


@pytest.mark.parametrize(
    ("process", "files", "cores", "counted"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000", "a/cpu.stat": "A"}, 1.5, True),
        ("0::/a\n", {"a/cpu.max": "max 100000", "a/cpu.stat": "A"}, None, False),
        (
            "2:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000", "cpu/a/cpu.stat": "A"},
            0.5,
            True,
        ),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, False),
    ],
)
def test_the_quota_of_a_process_is_the_least_that_its_groups_grant(
    process: str, files: dict[str, str], cores: float | None, counted: bool, tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(process)
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("nr_periods 40\nnr_throttled 30\nthrottled_usec 7\n" if text == "A" else f"{text}\n")
    where = str(tmp_path / "cgroup"), str(tmp_path / "groups")
    assert cpu.quota(*where) == cores
    assert cpu.throttled(*where) == ({"quota_periods": 40, "throttled_periods": 30} if counted else {})


GROUP = Path("/sys/fs/cgroup/cpu/dlprof-test")


@pytest.mark.skipif(not os.access(GROUP.parent / "cpu.cfs_quota_us", os.W_OK), reason="cannot make a control group")
def test_the_kernel_counts_the_periods_in_which_a_quota_stops_a_process() -> None:
    GROUP.mkdir(exist_ok=True)
    try:
        (GROUP / "cpu.cfs_quota_us").write_text("10000")
        spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            (GROUP / "cgroup.procs").write_text(str(spinning.pid))
            assert cpu.quota(f"/proc/{spinning.pid}/cgroup") == 0.1
            assert until(lambda: cpu.throttled(f"/proc/{spinning.pid}/cgroup")["throttled_periods"] > 1)
        finally:
            spinning.kill()
            spinning.wait()
    finally:
        GROUP.rmdir()


def test_processes_that_the_kernel_killed_are_counted(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\nother 1\n")
    assert cpu.oom_kills(str(tmp_path / "vmstat")) == 3
    assert cpu.oom_kills(str(tmp_path / "none")) is None


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))


def test_what_the_thread_and_what_the_process_have_used_are_two_things(tmp_path: Path) -> None:
    counters = {whole: KernelCounters(whole_process=whole) for whole in (False, True)}
    before = {whole: one.all() for whole, one in counters.items()}
    cores = counters[True].cores()
    other = threading.Thread(target=spin, args=(0.05,))
    other.start()
    other.join()
    spin(0.01)
    time.sleep(0.05)  # waiting is no use of a core
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert len((tmp_path / "file").read_bytes()) == 100_000
    used = {whole: used_between(before[whole], one.all()) for whole, one in counters.items()}
    assert 10_000_000 <= used[False][0] < 50_000_000
    assert used[True][0] >= 60_000_000
    for _, delayed, stored, read in used.values():
        assert min(delayed, stored) >= 0
        assert read >= 100_000
    process, _, thread = used_between(cores, counters[True].cores())
    assert process >= 60_000_000
    assert 10_000_000 <= thread < 50_000_000
    assert used_between((UNKNOWN, 5), (7, 9)) == (UNKNOWN, 4)


@pytest.mark.parametrize("how", ["closed by the script", "closed by us", "taken"])
def test_what_cannot_be_read_any_more_is_unknown_and_no_descriptor_is_touched(how: str, tmp_path: Path) -> None:
    counters = KernelCounters(whole_process=True)
    fd = counters._io.fd
    theirs = -1
    if how == "closed by us":
        counters.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    else:
        os.close(fd)
    if how == "taken":
        theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
        assert theirs == fd
    assert counters.all()[2:] == (UNKNOWN, UNKNOWN)
    counters.close()
    if how == "taken":
        os.fstat(theirs)
        os.close(theirs)
