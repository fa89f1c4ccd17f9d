"""What is kept of the CUDA allocator: on a GPU what it told, without one nothing and no word, unless asked for."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.schema import MEMORY
from tests.fixtures.jobs import COMPILES_NOTHING, facts, record

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

JOB = """
import sys, time, torch
from torch import nn
device = sys.argv[1]
model = nn.Linear(1024, 1024, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = []
for n in range(20):
    kept.append(torch.zeros(1 << 20, device=device))
    model(torch.randn(8, 1024, device=device)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
print(torch.cuda.is_initialized())
"""


def job(folder: Path, body: str = JOB) -> Path:
    path = folder / "job.py"
    path.write_text(COMPILES_NOTHING + dedent(body))
    return path


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ranks/00000/memory.jsonl").read_text().splitlines()]


def test_a_job_on_the_cpu_leaves_no_file_no_word_and_cuda_asleep(tmp_path: Path) -> None:
    done = record(job(tmp_path), "cpu", folder=tmp_path / "run", options=["--no-trace"])
    assert done.stdout == "False\n"
    assert not list((tmp_path / "run/ranks/00000").glob("memory*"))
    assert facts(tmp_path / "run/ranks/00000")["warnings"] == []


@pytest.mark.long
@pytest.mark.skipif(hasattr(torch._C, "_cuda_memoryStats"), reason="this PyTorch has an allocator for CUDA")
def test_a_history_that_cannot_be_is_told_in_one_line(tmp_path: Path) -> None:
    record(job(tmp_path), "cpu", folder=tmp_path / "run", options=["--no-trace", "--memory"])
    (warning,) = facts(tmp_path / "run/ranks/00000")["warnings"]
    assert "built without CUDA" in warning


@pytest.mark.long
@pytest.mark.skipif(hasattr(torch._C, "_cuda_memoryStats"), reason="this PyTorch has an allocator for CUDA")
def test_the_counters_are_written_a_few_times_a_second(tmp_path: Path) -> None:
    # Stands for the device: the answers have the form of torch._C._cuda_memoryStats. Times are the recorder's.
    device = """
    import torch
    asked = 0
    def told(device):
        global asked
        asked += 1
        counts = {"current": 100 * asked, "peak": 200 * asked, "allocated": 0, "freed": 0}
        return {"allocated_bytes": {"all": counts}, "reserved_bytes": {"all": counts},
                "num_alloc_retries": asked, "num_ooms": 0, "num_device_alloc": 7}
    torch._C._cuda_memoryStats = told
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 3
    """
    path = job(tmp_path, dedent(device) + JOB + "print(asked)\n")
    done = record(path, "cpu", folder=tmp_path / "run", options=["--no-trace", "--flops", "off"])
    found = lines(tmp_path / "run")
    asked = int(done.stdout.split()[-1])
    assert asked == len(found) + 2  # around the backward pass of the step whose memory is counted
    assert 2 <= len(found) < 20
    assert [list(line) for line in found] == [list(MEMORY)] * len(found)
    last = found[-1]
    assert (last["device"], last["allocated_bytes"]) == (3, 100 * asked)
    assert (last["peak_reserved_bytes"], last["retries"]) == (200 * asked, asked)
    moments = json.loads((tmp_path / "run/ranks/00000/held.json").read_text())["moments"]
    of_device = [m for m in moments if m["device"] != "cpu"]
    assert [(m["device"], m["moment"]) for m in of_device] == [("cuda:3", "backward"), ("cuda:3", "gradients")]
    assert of_device[0]["allocated_bytes"] + 100 == of_device[1]["allocated_bytes"]
    assert (last["device_allocs"], last["device_frees"]) == (7, None)


@gpu
@pytest.mark.gpu
def test_what_the_allocator_holds_and_the_history_of_it(tmp_path: Path) -> None:
    record(job(tmp_path), "cuda", folder=tmp_path / "run", options=["--no-trace", "--memory"])
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
    body = JOB + "try:\n    torch.empty(1 << 50, device=device)\nexcept torch.OutOfMemoryError:\n    import os\n"
    body += "    assert os.path.exists(os.environ['DLPROF_RUN'] + '/ranks/00000/memory_snapshot.pickle')\n"
    record(job(tmp_path, body), "cuda", folder=tmp_path / "run", options=["--no-trace", "--memory"])
