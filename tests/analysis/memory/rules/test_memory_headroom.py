"""Memory of the GPU: a larger batch where the device waits for its host, a warning where little is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from dlprof.analysis.memory.rules.memory_headroom import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.allocator import GB, GPU, reading, write
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


def recorded(
    folder: Path,
    *,
    busy: int,
    kept: int = 10,
    peak: int = 30,
    facts: dict[str, Any] | None = None,
    host: Literal["calls", "python", "fetch"] = "calls",
) -> Path:
    """Record steps of 1 ms in which the GPU computes for `busy` µs, then waits for a late launch; sizes in GB.

    `host`: what it does meanwhile: call operators, run the script's own Python, or wait for data.
    """
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        events += [traces.step(n, t, MS)]
        events += traces.launched("gemm", t, t, busy * 500, 10 * n + 1)
        late = t + MS - busy * 500
        events += [traces.op("aten::linear", t + 6_000, MS - 8_000)] if host == "calls" else []
        events += [traces.fetch(t + 6_000, late - t - 10_000)] if host == "fetch" else []
        events += traces.launched("gemm", late, late, busy * 500, 10 * n + 2)
    loaders = [{"role": "train", "batch_size": 32}]
    told = {**GPU, "loaders": loaders} if facts is None else facts
    path = runs.recorded(folder, (traces.trace(*events, world_size=1), [], told))
    rows = [
        reading(n, kept * GB, peak_allocated_bytes=peak * GB, peak_reserved_bytes=(peak + 2) * GB) for n in range(9)
    ]
    write(path, rows)
    return path


def test_the_batch_that_fills_the_gpu_is_named_and_no_larger_one(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, busy=600))
    assert (found.state, found.scope, found.training) == ("found", "step", True)
    # The host takes 1 ms for any batch. With 1.5 times the batch the GPU works for 0.9 ms of it: 48 samples.
    assert found.changes[0].settings == (Setting("batch_size", 32, 48),)
    assert (found.changes[0].numerics, found.changes[0].training) == (True, True)
    assert found.saving_ns == pytest.approx(MS / 3, rel=0.01)
    assert (found.ranks, found.verdict) == ((0,), "33 % of each step would be saved by a batch 1.5 times as large.")
    assert found.evidence is not None
    # 10 GB stay and 20 come and go: 40 GB with 1.5 times the batch.
    assert [row[::2] for row in found.evidence.rows] == [(1, 0.3), (1.5, 0.4)]
    times, speeds = zip(*(row[1::2] for row in found.evidence.rows), strict=True)
    assert "For 40 % of the 1.00 ms step the GPU waits." in found.summary
    assert (
        "With a batch 1.5 times as large, which needs 40 % of its memory, it works for nine tenths of the step"
        in found.summary
    )
    assert times == pytest.approx((MS, MS / 1.5), rel=0.01)
    assert speeds == pytest.approx((1, 1.5), rel=0.01)


def test_of_a_batch_that_no_loader_has_the_multiple_is_told(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, busy=400, facts=GPU))
    assert found.changes[0].text.startswith("a batch 2.25 times as large, ")
    assert (found.changes[0].settings, found.changes[0].training) == ((), True)


LEFT_ALONE = {
    "it works nearly all the time": ({"busy": 980}, "a larger batch would save little"),
    "it works for nine tenths": ({"busy": 905}, "a larger batch would save little"),
    "eight times the batch would not fill it": ({"busy": 100}, "up to 8 times the batch the GPU would still wait"),
    "its data come as late with any batch": ({"busy": 600, "host": "fetch"}, "up to 8 times the batch"),
    "the script's Python may grow": ({"busy": 600, "host": "python"}, "up to 8 times the batch"),
    "the batch that fills it does not fit": ({"busy": 600, "peak": 80}, "1.5 times as large, needs 115 %"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_gpu_is_left_alone_where(name: str, tmp_path: Path) -> None:
    given, why = LEFT_ALONE[name]
    clear = ask(RULE, recorded(tmp_path, **given))  # type: ignore[arg-type]
    assert (clear.state, clear.share, why in clear.summary) == ("clear", 0, True), clear.summary


def test_steps_that_cannot_be_replayed_tell_nothing_of_a_larger_batch(tmp_path: Path) -> None:
    path = recorded(tmp_path, busy=600)
    (path / "ranks/00000/trace.json.gz").unlink()
    assert ask(RULE, path).state == "not_measured"


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
