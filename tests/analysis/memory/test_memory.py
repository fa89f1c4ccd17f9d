"""What the CUDA allocator took of a GPU, and what the result says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.memory.memory import memory_series, memory_use
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import runs
from tests.fixtures.allocator import GB, reading, recorded

SECOND = 10**9


def test_peaks_headroom_and_what_the_cache_could_not_serve(tmp_path: Path) -> None:
    readings = [reading(n, (20 + n) * GB) for n in range(10)] + [reading(10, 5 * GB, retries=3, ooms=1)]
    path = recorded(tmp_path, readings)
    (found,) = runs.measured(path, memory_use).frame(memory_use).to_dict("records")
    assert found == {
        "peak_allocated_bytes": 29 * GB + GB // 2, "peak_reserved_bytes": 31 * GB,
        "kept_bytes": 5 * GB, "total_bytes": 100 * GB,
        "retries": 3, "ooms": 1, "late": 5, "rank": 0,
    }  # fmt: skip
    (path / "ranks/00000/memory_snapshot.pickle").touch()
    result = diagnose(open_run(path), (), jobs=1)
    told = {fact.name: fact.value for fact in result.facts if fact.section == "Memory"}
    assert told["most allocated"] == "29.5 GB of 100 GB (30 %)"
    assert told["allocations retried after emptying the cache"] == "3"
    assert told["for pytorch.org/memory_viz"] == "ranks/00000/memory_snapshot.pickle"
    (panel,) = [p for p in result.panels if p.title == "GPU memory of PyTorch"]
    assert panel.columns == ("time_ns", "rank 0 reserved", "rank 0 allocated")
    assert panel.rows[-1] == (10 * SECOND, 6 * GB, 5 * GB)


def test_a_long_job_is_thinned_and_an_older_pytorch_tells_less(tmp_path: Path) -> None:
    readings = [reading(n, GB) | {"device_allocs": None} for n in range(1_001)]
    run = runs.measured(recorded(tmp_path, readings), memory_use, memory_series)
    assert run.frame(memory_use)["late"].to_list() == [-1]
    assert run.frame(memory_series)["step"].to_list() == list(range(0, 1_001, 3))


def test_a_job_without_cuda_is_not_measured(tmp_path: Path) -> None:
    path = recorded(tmp_path, [])
    for why in ("was not sampled", "CUDA allocator"):
        with pytest.raises(NotMeasured, match=why):
            runs.measured(path, memory_use).frame(memory_use)
        (path / "ranks/00000/memory.jsonl").unlink(missing_ok=True)
