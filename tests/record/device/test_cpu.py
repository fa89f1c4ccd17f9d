"""What the kernel says of the first core, and the units that a process may use."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlprof.record.device import cpu

XEON = "processor\t: 0\nmodel name\t: Intel Xeon\nflags\t\t: fpu fma avx2 avx512f avx512_bf16 amx_tile amx_bf16\n\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm sve\n\n"


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cpuinfo"
    first = cpu._first_core.__wrapped__
    monkeypatch.setattr(cpu, "_first_core", lambda: first(str(path)))
    return path


def torch_that(monkeypatch: pytest.MonkeyPatch, **answers: bool) -> None:
    questions = {name: lambda answer=answer: answer for name, answer in answers.items()}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=SimpleNamespace(**questions)))


def test_the_first_core_stands_for_all(core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core.write_text(XEON + "processor\t: 1\nmodel name\t: another\nflags\t\t: fpu\n\n")
    torch_that(monkeypatch, _is_amx_tile_supported=True)
    assert cpu.name() == "Intel Xeon"
    assert cpu.units() == ["amx_bf16", "amx_tile", "avx2", "avx512_bf16", "avx512f", "fma"]


def test_tiles_that_the_kernel_does_not_grant_are_none(core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core.write_text(XEON)
    torch_that(monkeypatch, _is_amx_tile_supported=False)
    assert cpu.units() == ["avx2", "avx512_bf16", "avx512f", "fma"]
    torch_that(monkeypatch)  # an older torch does not know
    assert "amx_bf16" in (cpu.units() or ())


def test_arm_calls_them_features_and_what_names_none_is_not_known(core: Path) -> None:
    core.write_text(ARM)
    assert cpu.units() == ["bf16", "i8mm", "sve"]
    core.write_text("processor\t: 0\n\n")
    assert cpu.units() is None


def test_this_processor_has_a_name_and_a_quota_above_nothing() -> None:
    assert cpu.name()
    quota = cpu.quota()
    assert quota is None or quota > 0


def test_cores_are_written_as_the_kernel_writes_them() -> None:
    assert cpu.listed([3, 0, 1, 2, 8]) == "0-3,8"
    assert cpu.listed([5]) == "5"
    assert cpu.listed([0, 1]) == "0-1"
    assert cpu.cores()


def test_the_nodes_of_a_host_and_of_a_device(tmp_path: Path) -> None:
    for node, cores in (("node0", "0-15"), ("node1", "16-31")):
        (tmp_path / "nodes" / node).mkdir(parents=True)
        (tmp_path / "nodes" / node / "cpulist").write_text(f"{cores}\n")
    assert cpu.nodes(str(tmp_path / "nodes")) == {"0": "0-15", "1": "16-31"}
    assert cpu.nodes(str(tmp_path / "none")) == {}
    for pci, node in (("0000:c1:00.0", "1"), ("0000:01:00.0", "-1")):
        (tmp_path / pci).mkdir()
        (tmp_path / pci / "numa_node").write_text(f"{node}\n")
    assert cpu.node_of("0000:c1:00.0", str(tmp_path)) == 1
    assert cpu.node_of("0000:01:00.0", str(tmp_path)) is None
    assert cpu.node_of(None) is None


def test_the_memory_of_a_process_is_the_least_that_its_groups_grant(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    process = tmp_path / "cgroup"
    process.write_text("0::/slurm/job_1/step_0\n")
    for name, text in (("slurm", "max"), ("slurm/job_1", "3000"), ("slurm/job_1/step_0", "max")):
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / "memory.max").write_text(f"{text}\n")
    assert cpu.memory_limit(str(process), str(groups)) == 3000
    # Version 1 has a tree of its own, and writes a huge number where there is no limit.
    process.write_text("5:cpu,cpuacct:/a\n4:memory:/a\n")
    (groups / "memory/a").mkdir(parents=True)
    (groups / "memory/a/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cpu.memory_limit(str(process), str(groups)) is None
    (groups / "memory/memory.limit_in_bytes").write_text("5000\n")
    assert cpu.memory_limit(str(process), str(groups)) == 5000


def test_processes_that_the_kernel_killed_are_counted(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\nother 1\n")
    assert cpu.oom_kills(str(tmp_path / "vmstat")) == 3
    assert cpu.oom_kills(str(tmp_path / "none")) is None
