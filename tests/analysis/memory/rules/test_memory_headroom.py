"""Memory of the GPU: a larger batch where the device waits for its host, a warning where little is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory.rules.memory_headroom import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.allocator import GB, GPU, reading, write
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


def recorded(folder: Path, *, busy: int, kept: int = 10, peak: int = 30, facts: dict[str, Any] | None = None) -> Path:
    """Record steps of 1 ms in which the GPU computes for `busy` µs, then waits for a late launch; sizes in GB."""
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        events += [traces.step(n, t, MS)]
        events += traces.launched("gemm", t, t, busy * 500, 10 * n + 1)
        late = t + MS - busy * 500
        events += traces.launched("gemm", late, late, busy * 500, 10 * n + 2)
    loaders = [{"role": "train", "batch_size": 32}]
    told = {**GPU, "loaders": loaders} if facts is None else facts
    path = runs.recorded(folder, (traces.trace(*events, world_size=1), [], told))
    rows = [
        reading(n, kept * GB, peak_allocated_bytes=peak * GB, peak_reserved_bytes=(peak + 2) * GB) for n in range(9)
    ]
    write(path, rows)
    return path


def test_a_gpu_that_waits_for_its_host_has_room_for_more(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, busy=600))
    assert (found.state, found.scope) == ("found", "step")
    # It waits for 0.4 of each ms; with twice the batch it computes for 1.2 ms, and the host is ahead.
    assert found.saving_ns == pytest.approx(0.4 * MS, rel=0.01)
    assert (found.ranks, found.verdict) == ((0,), "40 % of each step would be saved by a batch twice as large.")
    assert found.changes[0].settings == (Setting("batch_size", 32, 64),)
    assert found.changes[0].numerics
    assert found.evidence is not None
    # 10 GB stay and 20 come and go: 50 GB with twice the batch, 90 with four times, 170 with eight times.
    needs = {row[0]: row[3] for row in found.evidence.rows}
    assert needs == {1: 0.3, 1.5: 0.4, 2: 0.5, 3: 0.7, 4: 0.9}
    assert [row[1] for row in found.evidence.rows] == [32, 48, 64, 96, 128]
    times, speeds = zip(*(row[2::2] for row in found.evidence.rows if row[0] in (1, 2)), strict=True)
    assert "The largest batch known to fit is 128 samples, with 90 % of the memory." in found.summary
    assert times == pytest.approx((MS, 0.6 * MS), rel=0.01)
    assert speeds == pytest.approx((1, 1 / 0.6), rel=0.01)


def test_a_batch_that_nobody_recorded_is_twice_as_large(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, busy=600, facts=GPU))
    assert found.changes[0].text.startswith("a batch twice as large")
    assert (found.changes[0].settings, found.changes[0].numerics) == ((), True)


def test_a_gpu_that_computes_all_the_time_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, busy=980))
    assert clear.state == "clear"
    # It waits for 20 µs and for what a launch takes, and with any batch computes for 0.98 ms for as many samples.
    assert clear.share == pytest.approx(0.02, abs=0.003)
    assert [cost.rank for cost in clear.by_rank] == [0]


def test_the_largest_size_that_fits_is_named_and_not_only_twice_the_batch(tmp_path: Path) -> None:
    # 10 GB stay, 50 GB grow: 1.64 times the batch fill 92 GB, and 48 is the multiple of 8 below 52.
    found = ask(RULE, recorded(tmp_path, busy=600, kept=10, peak=60))
    assert found.changes[0].settings == (Setting("batch_size", 32, 48),)
    assert found.saving_ns == pytest.approx(MS / 3, rel=0.01)  # the host's 1 ms is of one and a half batches
    assert "is 48 samples, with 85 % of the memory" in found.summary


def test_no_larger_batch_is_proposed_where_none_fits(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, busy=600, kept=10, peak=80))
    assert (clear.state, clear.share, "80 % of" in clear.summary) == ("clear", 0, True)
    assert "no larger batch would fit" in clear.summary


def test_memory_that_is_nearly_used_up_is_a_risk(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, busy=980, kept=40, peak=94))
    assert (found.state, found.scope, found.saving_ns) == ("found", "risk", 0)
    assert "94 GB of 100 GB allocated" in found.summary
    assert found.ranks == (0,)
    assert "(is 32)" in found.changes[0].text
    assert [(c.settings, c.numerics) for c in found.changes] == [
        ((), True),
        ((), False),
        ((Setting("PYTORCH_CUDA_ALLOC_CONF", None, "expandable_segments:True"),), False),
    ]
    assert found.evidence is not None
    assert found.evidence.columns == (
        "rank",
        "peak allocated_bytes",
        "peak reserved_bytes",
        "GPU memory_bytes",
        "reserved_share",
    )
    assert found.evidence.rows == ((0, 94 * GB, 96 * GB, 100 * GB, 0.96),)
    reserved = ask(RULE, recorded(tmp_path / "reserved", busy=980, kept=40, peak=90))
    assert reserved.state == "clear"


def test_without_a_gpu_or_its_allocator_it_abstains(tmp_path: Path) -> None:
    assert "on the CPU" in ask(RULE, recorded(tmp_path / "cpu", busy=600, facts=dict(runs.CPU))).why
    path = recorded(tmp_path / "unasked", busy=600)
    (path / "ranks/00000/memory.jsonl").unlink()
    assert ask(RULE, path).state == "not_measured"
    unknown = recorded(tmp_path / "unknown", busy=600, facts={"device": {"type": "cuda"}})
    assert "not recorded" in ask(RULE, unknown).why
