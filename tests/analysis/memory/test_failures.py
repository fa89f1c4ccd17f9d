"""How a rank ran out of memory: by the error that ended it, or by the kernel; and that a healthy end shows nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory.failures import ERROR, KERNEL, KILLED, memory_failures
from tests.fixtures import allocator, runs
from tests.fixtures.allocator import GB, GPU
from tests.fixtures.runs import MS
from tests.fixtures.traces import BASE_NS

GIB = 1 << 30

# As PyTorch 2.13 words it.
SAID = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB is free."
    " Including non-PyTorch memory, this process has 77.80 GiB memory in use. Of the allocated memory 75.00 GiB is"
    " allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory"
    " is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
FAILURE = {"type": "OutOfMemoryError", "text": SAID, "site": "forward (/home/me/model.py:10)"}
CPU = {"device": {"type": "cpu", "memory_bytes": 16 * GB}, "host": "node-1"}


def recorded(folder: Path, facts: dict[str, Any], **info: Any) -> Path:
    """Record 30 steps that a rank took until it died."""
    return runs.recorded(folder / "run", (None, [runs.light(n, 10 * MS) for n in range(30)], facts), **info)


def samples(path: Path, rss: int, left: int, used: int) -> None:
    """Write the last readings of the process and of its host, bytes."""
    row = {"at_ns": BASE_NS, "perf_ns": 1}
    (path / "ranks/00000/processes.jsonl").write_text(
        json.dumps(row | {"rss_bytes": rss, "children_rss_bytes": 0}) + "\n"
    )
    (path / "hosts/node-1").mkdir(parents=True)
    host = row | {"memory_used_bytes": used, "memory_available_bytes": left}
    (path / "hosts/node-1/host.jsonl").write_text(json.dumps(host) + "\n")


def rows(path: Path) -> list[dict[Any, Any]]:
    return runs.measured(path, memory_failures).frame(memory_failures).to_dict("records")


def test_the_error_that_ended_a_rank_has_all_that_pytorch_says(tmp_path: Path) -> None:
    path = recorded(tmp_path, {**GPU, "failure": FAILURE, "ended": "exit"}, exit={"code": 1, "signal": None})
    allocator.write(path, [allocator.reading(n, 70 * GB) for n in range(9)])
    (row,) = rows(path)
    assert (row["rank"], row["device"], row["how"], row["step"]) == (0, "0", ERROR, 29)
    assert row["site"] == "forward (model.py:10)"
    assert row["requested_bytes"] == 2.5 * GIB
    assert row["allocated_bytes"] == 75 * GIB
    assert row["reserved_bytes"] == 75.5 * GIB
    assert row["device_free_bytes"] == 1.25 * GIB
    assert row["total_bytes"] == pytest.approx(79.1 * GIB)


def test_an_error_in_other_words_leaves_the_last_reading(tmp_path: Path) -> None:
    path = recorded(tmp_path, {**GPU, "failure": FAILURE | {"text": "out of memory"}})
    allocator.write(path, [allocator.reading(n, (70 + n) * GB) for n in range(9)])
    (row,) = rows(path)
    assert row["allocated_bytes"] == 78 * GB
    assert str(row["requested_bytes"]) == "nan"


def test_a_process_that_the_kernel_counted_as_killed(tmp_path: Path) -> None:
    path = recorded(tmp_path, CPU, exit={"code": 137, "signal": None}, oom_kills=1)
    samples(path, rss=3 * GB, left=9 * GB, used=7 * GB)
    (row,) = rows(path)
    assert (row["how"], row["device"], row["allocated_bytes"], row["total_bytes"]) == (KERNEL, "host", 3 * GB, 16 * GB)


def test_a_container_grants_less_than_the_host(tmp_path: Path) -> None:
    path = recorded(tmp_path, CPU | {"cpu": {"memory_limit_bytes": 3 * GB}}, exit={"code": None, "signal": 9})
    samples(path, rss=28 * GB // 10, left=9 * GB, used=7 * GB)
    (row,) = rows(path)
    assert (row["how"], row["total_bytes"]) == (KILLED, 3 * GB)


def test_a_process_that_somebody_killed_with_memory_left_did_not_run_out(tmp_path: Path) -> None:
    path = recorded(tmp_path, CPU, exit={"code": None, "signal": 9})
    samples(path, rss=3 * GB, left=9 * GB, used=7 * GB)
    assert rows(path) == []


@pytest.mark.parametrize(
    "info", [{"exit": {"code": 0, "signal": None}, "oom_kills": 1}, {"exit": {"code": 1, "signal": None}}]
)
def test_a_rank_that_wrote_its_end_was_not_killed(tmp_path: Path, info: dict[str, Any]) -> None:
    path = recorded(tmp_path, CPU | {"ended": "exit"}, **info)
    samples(path, rss=15 * GB, left=GB, used=15 * GB)
    assert rows(path) == []
