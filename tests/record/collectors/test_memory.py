"""What is kept of the CUDA allocator: on a GPU what it told, without one nothing and no word, unless asked for."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest

from dlprof.schema import MEMORY
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import COMPILES_NOTHING, facts, record, rows

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

JOB = """
import time, torch
from torch import nn
device = globals().get("device", "cpu")
model = nn.Linear(1024, 1024, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = []
for n in range(20):
    kept.append(torch.zeros(1 << 20, device=device))
    model(torch.randn(8, 1024, device=device)).sum().backward()
    optimizer.step()
    time.sleep(PAUSE_S)
"""

needs_no_cuda = pytest.mark.skipif(hasattr(torch._C, "_cuda_memoryStats"), reason="this PyTorch has one for CUDA")


def lines(folder: Path) -> list[dict[str, Any]]:
    return rows(folder / "ranks/00000", "memory")


@pytest.mark.long
@needs_no_cuda
def test_a_history_that_cannot_be_costs_one_warning(tmp_path: Path) -> None:
    run_recorded(tmp_path, JOB.replace("PAUSE_S", "0"), memory=True, warnings=1)
    assert "built without CUDA" in facts(tmp_path / "run/ranks/00000")["warnings"][0]


@pytest.mark.long
@needs_no_cuda
def test_the_counters_are_written_a_few_times_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    every_ns = 50_000_000  # instead of a quarter of a second

    def stats(device: int) -> dict[str, Any]:
        """Answer as torch._C._cuda_memoryStats does."""
        reads.append(device)
        counts = {"current": 100 * len(reads), "peak": 200 * len(reads), "allocated": 0, "freed": 0}
        counted = {"allocated_bytes": {"all": counts}, "reserved_bytes": {"all": counts}}
        return {**counted, "num_alloc_retries": len(reads), "num_ooms": 0, "num_device_alloc": 7}

    monkeypatch.setattr("dlprof.record.collectors.memory._READ_EVERY_NS", every_ns)
    monkeypatch.setattr("dlprof.record.recorder._PASS_ON_EVERY_NS", every_ns)
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", stats, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    run_recorded(tmp_path, JOB.replace("PAUSE_S", "0.01"), flops="off", warnings=None)
    found = lines(tmp_path / "run")
    assert len(reads) == len(found) + 2  # around the backward pass of the step whose memory is counted
    assert len(found) >= 2
    assert all(after["at_ns"] - before["at_ns"] >= every_ns for before, after in itertools.pairwise(found))
    assert [list(line) for line in found] == [list(MEMORY)] * len(found)
    last = found[-1]
    assert (last["device"], last["allocated_bytes"]) == (3, 100 * len(reads))
    assert (last["peak_reserved_bytes"], last["retries"]) == (200 * len(reads), len(reads))
    assert (last["device_allocs"], last["device_frees"]) == (7, None)
    moments = rows(tmp_path / "run/ranks/00000", "held")[-1]["moments"]
    of_device = [m for m in moments if m["device"] != "cpu"]
    assert [(m["device"], m["moment"]) for m in of_device] == [("cuda:3", "backward"), ("cuda:3", "gradients")]
    assert of_device[0]["allocated_bytes"] + 100 == of_device[1]["allocated_bytes"]


def job(folder: Path, body: str = "") -> Path:
    path = folder / "job.py"
    path.write_text(COMPILES_NOTHING + "device = 'cuda'\n" + JOB.replace("PAUSE_S", "0.05") + body)
    return path


@gpu
@pytest.mark.gpu
def test_what_the_allocator_holds_and_the_history_of_it(tmp_path: Path) -> None:
    record(job(tmp_path), folder=tmp_path / "run", options=["--no-trace", "--memory"])
    found = lines(tmp_path / "run")
    assert len(found) >= 2
    assert found[-1]["allocated_bytes"] > found[0]["allocated_bytes"] > 4 << 20
    assert all(line["peak_allocated_bytes"] >= line["allocated_bytes"] for line in found)
    assert all(line["reserved_bytes"] >= line["allocated_bytes"] for line in found)
    assert found[-1]["device_allocs"] > 0
    with (tmp_path / "run/ranks/00000/memory_snapshot.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    assert any(trace for trace in snapshot["device_traces"])


@gpu
@pytest.mark.gpu
def test_the_history_is_there_when_memory_has_run_out(tmp_path: Path) -> None:
    body = "try:\n    torch.empty(1 << 50, device=device)\nexcept torch.OutOfMemoryError:\n    import os\n"
    body += "    assert os.path.exists(os.environ['DLPROF_RUN'] + '/ranks/00000/memory_snapshot.pickle')\n"
    record(job(tmp_path, body), folder=tmp_path / "run", options=["--no-trace", "--memory"])
