"""The doctor tries what it speaks of: real processes, on this machine as it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dlprof.commands import doctor
from dlprof.commands.run import count_gpus
from tests.fixtures import jobs


def checks(cwd: Path, **env: str) -> dict[str, Any]:
    done = jobs.launch([*jobs.DLPROF, "doctor", "--format", "json"], cwd, env=jobs.environment(**env))
    assert (done.returncode, done.stderr) == (0, "")
    return {check["source"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.mark.long
def test_every_source_is_tried_and_what_fails_comes_with_a_remedy(tmp_path: Path) -> None:
    told = checks(tmp_path)
    assert len(told) == len(doctor.CHECKS)
    for source in ("recorder", "torch", "torch.profiler", "host", "loader", "disk"):
        assert told[source]["works"], told[source]
    assert "2." in told["torch"]["found"]
    assert str(os.cpu_count()) in told["host"]["found"]
    for check in told.values():
        assert check["found"]
        assert check["works"] or check["remedy"] or check["source"] == "SLURM", check
    # Whatever was tried left nothing behind.
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor._disk().works
    (tmp_path / "runs").write_text("not a folder")
    check = doctor._disk()
    assert not check.works
    assert "-o" in check.remedy


def test_a_python_without_torch_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that cannot be imported, as a broken installation has it."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    doctor._ask_torch.cache_clear()
    try:
        check = doctor._torch()
        assert not check.works
        assert "libtorch_cpu.so" in check.found
        assert not doctor._trace().works
    finally:
        doctor._ask_torch.cache_clear()


# Stands for torch on a machine with a GPU, as far as the doctor asks it; CUPTI and the kernel are the test's.
TORCH = """
import sys
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace as N

__version__ = "2.13.0"
version = N(cuda="12.6", hip={hip!r})
cuda = N(is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda _: "NVIDIA H100", synchronize=int)
autograd = N(DeviceType=Enum("DeviceType", "CPU CUDA"))
ones = lambda *_, **__: 1

class ProfilerActivity(Enum):
    CPU, CUDA = range(2)

@contextmanager
def profile(activities):
    sys.stderr.write({said!r})
    if {fails!r}:
        raise RuntimeError("CUDA error: out of memory")
    kinds = [autograd.DeviceType.CPU] + [autograd.DeviceType.CUDA] * {events}
    yield N(profiler=N(kineto_results=N(events=lambda: [N(device_type=lambda k=k: k) for k in kinds])))

profiler = ModuleType("torch.profiler")
profiler.ProfilerActivity, profiler.profile = ProfilerActivity, profile
profiler.supported_activities = lambda: set(ProfilerActivity)
sys.modules["torch.profiler"] = profiler
"""
HEAD = "WARNING:2026-01-02 03:04:05 17:18 CuptiActivityApi.cpp:360] "


def traced(monkeypatch: pytest.MonkeyPatch, folder: Path, **machine: Any) -> doctor.Check:
    known = {"said": "", "events": 2, "fails": False, "hip": None} | machine
    (folder / "torch.py").write_text(TORCH.format(**known))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(doctor, "_admins_only", lambda: bool(machine.get("admins")))
    doctor._ask_torch.cache_clear()
    try:
        return doctor._trace()
    finally:
        doctor._ask_torch.cache_clear()


@pytest.mark.parametrize(
    ("machine", "works", "found", "remedy"),
    [
        ({"said": "STAGE:2026-01-02 03:04:05 17:18 a.cpp:1] Completed Stage: Warm Up\n"}, True, "one kernel", ""),
        (
            {
                "events": 0,
                "said": f"{HEAD}f() failed: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (35)\n",
            },
            *(False, "PRIVILEGES (35)", "NVreg_RestrictProfilingToAdminUsers"),
        ),
        (
            {"events": 0, "said": f"{HEAD}f() failed: CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)\n"},
            *(False, "no event of it came", "nsys"),
        ),
        ({"events": 0}, False, "", "CUDA_INJECTION64_PATH"),
        ({"events": 0, "admins": True}, False, "", "NVreg_RestrictProfilingToAdminUsers"),
        ({"fails": True}, False, "CUDA error: out of memory", ""),
    ],
)
def test_one_kernel_is_profiled_where_there_is_a_gpu(
    machine: dict[str, Any], works: bool, found: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = traced(monkeypatch, tmp_path, **machine)
    assert (check.works, found in check.found, remedy in check.remedy) == (works, True, True), check


def test_a_torch_for_amds_gpus_is_asked_for_amdsmi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "amdsmi.py").write_text("raise ImportError('no amdsmi here')")
    assert traced(monkeypatch, tmp_path, hip="7.0").works
    check = doctor._gpu()
    doctor._ask_torch.cache_clear()
    assert (check.source, check.works) == ("amdsmi", False)
    assert "no amdsmi here" in check.found
    (tmp_path / "amdsmi.py").write_text("__version__ = '7.0.2'\ndef amdsmi_init(): pass")
    assert doctor._gpu().works
    doctor._ask_torch.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() < 1, reason="needs a GPU, and there is none here")
def test_a_real_gpu_is_profiled() -> None:
    doctor._ask_torch.cache_clear()
    check = doctor._trace()
    assert check.works, check
    assert "one kernel" in check.found
