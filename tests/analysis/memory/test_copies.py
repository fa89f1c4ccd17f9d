"""Copies between host and device, and activations that are computed twice: what their rules find and leave alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.host.rules import host_sync
from dlprof.analysis.memory.copies import copies, freeing_ns, hideable
from dlprof.analysis.memory.rules import blocking_copy, exposed_copy, needless_recompute, pageable_copy
from dlprof.analysis.step.breakdown import breakdown
from dlprof.read.run import open_run
from dlprof.result import Outcome, Setting
from tests.fixtures import layers, readings, runs, traces
from tests.fixtures.allocator import GB, GPU, copied_batches, reading, write
from tests.fixtures.asking import ask, ask_all
from tests.fixtures.runs import MS, asked

US = 1_000
PAGEABLE, PINNED, BACK = "HtoD (Pageable -> Device)", "HtoD (Pinned -> Device)", "DtoH (Device -> Pageable)"


def test_copies_are_counted_per_step_by_way_and_memory(tmp_path: Path) -> None:
    events = [traces.copy(-MS, 1_000, 1_000_000)]  # before the steps
    for n in range(2):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.kernel("gemm", t, 300_000),
            traces.copy(t + 200_000, 200_000, 1_000_000),  # half of it behind the kernel
            traces.copy(t + 500_000, 100_000, 500_000, PINNED),
            traces.copy(t + 700_000, 1_000, 8),  # a scalar
            traces.copy(t + 800_000, 50_000, 700_000, BACK),
        ]
    frame = runs.rank_of(tmp_path, traces.trace(*events)).once(copies)
    assert {(c, m): tuple(row) for c, m, *row in frame.itertuples(index=False)} == {
        ("HtoD", "pageable"): (1, 1_000_000, 200_000, 100_000),
        ("HtoD", "pinned"): (1, 500_000, 100_000, 100_000),
        ("DtoH", "pageable"): (1, 700_000, 50_000, 50_000),
    }


def test_a_copy_hides_behind_no_more_than_is_computed(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.kernel("gemm", 0, 200_000), world_size=1)
    run = runs.measured(runs.foreign(tmp_path, made), breakdown, copies)
    assert asked(run, hideable, exposed={0: 50_000.0}) == {0: 50_000}
    assert asked(run, hideable, exposed={0: 700_000.0}) == {0: 200_000}


@pytest.mark.parametrize(("workers", "freeing"), [(4, (970_000, 2_000_000)), (0, (0, 0))])
def test_shared_memory_is_freed_by_whoever_takes_it_from_workers(
    tmp_path: Path, workers: int, freeing: tuple[float, float]
) -> None:
    facts = {**runs.GPU, "loaders": [{"role": "train", "num_workers": workers}]}
    rank = RankData(open_run(copied_batches(tmp_path, facts=facts)).ranks[0])
    assert rank.once(freeing_ns) == pytest.approx(freeing)


# -- the rules of copies that take time of a step of 1 ms: the share saved by each, or its state and the share lost


def loader(**said: Any) -> dict[str, Any]:
    told = [{"role": "train", "pin_memory": False, **said}] if said else []
    return {"facts": {"device": {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"}, "loaders": told}}


BATCHES: dict[str, tuple[dict[str, Any], float | None, float | None]] = {
    # An H100 takes 10 MB from pinned memory in 0.2 ms; and the kernel is launched meanwhile.
    "pageable": ({}, 0.208, None),
    "pinned": ({"kinds": PINNED}, None, 0.383),  # but for launching what then comes first
    "back": ({"kinds": BACK}, None, 0.383),
    "hidden pageable": ({"beside": True}, -0.0, None),
    "hidden pinned": ({"kinds": PINNED, "beside": True}, None, -0.002),  # what it takes until it computes
    "a few bytes": ({"size": 8}, None, None),
    "no more than is computed to hide behind": ({"kinds": PINNED, "takes": 700_000}, None, 0.28),
    "pinned copies of the trace tell how fast the link is": (
        {"pinned": True, "device": "An unknown GPU"}, 0.3065, None,
    ),
    # Where nothing tells, they are as slow as now, and only the wait for them is gained: 8 µs until the kernel runs.
    "nothing tells how fast the link is": ({"device": "An unknown GPU"}, -0.0065, None),
    # 10 MB that take 0.4 ms of a step of 1 ms are pinned in 0.5 ms, beside the step; or by whoever trains.
    "pinned by a thread": ({"takes": 400_000, **loader(num_workers=4)}, 0.208, None),
    "pinned by the training thread": ({"takes": 400_000, **loader(num_workers=0)}, 0.208, None),
    # 0.75 ms, known to a tenth, bound a step from which 0.4 ms would go.
    "pinning binds the step": ({"takes": 600_000, **loader(num_workers=4)}, 0.175, None),
    "and what the host launches": ({"takes": 600_000, **loader(num_workers=0)}, 0.151, None),  # beside 22 µs
    # Memory of its own that the script pins once costs nothing in a step, nor is it known of a job without facts.
    "pinned already": ({"takes": 800_000, **loader(num_workers=4, pin_memory=True)}, 0.608, None),
    "no facts of a loader": ({"takes": 800_000, **loader()}, 0.608, None),
}  # fmt: skip


def told(found: Outcome) -> float | None:
    """Return the share that is saved; below 0: lost and left alone; None: clear without any."""
    assert found.state in ("found", "clear")
    return found.share if found.state == "found" else -found.share if found.share else None


@pytest.mark.parametrize("name", BATCHES)
def test_copies_are_found_by_the_rule_of_their_memory(tmp_path: Path, name: str) -> None:
    how, pageable, exposed = BATCHES[name]
    path = copied_batches(tmp_path, **how)
    found = ask_all((pageable_copy.RULE, exposed_copy.RULE), path)
    assert [told(outcome) for outcome in found] == [
        pytest.approx(share, rel=0.01) if share else None for share in (pageable, exposed)
    ]


def test_a_copy_from_pageable_memory_with_bytes_rate_and_settings(tmp_path: Path) -> None:
    found = ask(pageable_copy.RULE, copied_batches(tmp_path, **loader(num_workers=4)))
    assert "25 GB/s" in found.summary
    assert found.ranks == (0,)
    settings = [change.settings for change in found.changes]
    assert settings == [(Setting("pin_memory", False, True),), (Setting("non_blocking", None, True),)]
    assert found.evidence is not None
    assert found.evidence.columns[3:] == ("size_bytes", "time_ns", "exposed_ns", "rate per second_bytes")
    assert found.evidence.rows == (("HtoD", "pageable", 1, 10_000_000, 400_000, 400_000, pytest.approx(25e9)),)


def test_pinning_that_takes_as_long_as_the_step_is_not_advised(tmp_path: Path) -> None:
    answer = ask(pageable_copy.RULE, copied_batches(tmp_path, takes=800_000, **loader(num_workers=4)))
    assert answer.state == "clear"
    assert answer.lost_share == pytest.approx(0.8, rel=0.02)
    assert "one thread takes about 1.00 ms for it, and a step 1.00 ms" in answer.summary


@pytest.mark.parametrize(("kinds", "way"), [(PINNED, "to the device"), (BACK, "from the device")])
def test_an_exposed_copy_with_its_way(tmp_path: Path, kinds: str, way: str) -> None:
    found = ask(exposed_copy.RULE, copied_batches(tmp_path, kinds))
    assert (way in found.title, found.ranks) == (True, (0,))
    assert found.changes[0].settings == (Setting("non_blocking", None, True),)


def test_without_a_device_or_links_rules_of_copies_abstain(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.op("aten::mm", 0, MS), device="", backend="gloo", world_size=1)
    cpu = runs.foreign(tmp_path / "cpu", made)
    for rule in (pageable_copy.RULE, exposed_copy.RULE, blocking_copy.RULE):
        assert ask(rule, cpu).state == "does_not_apply"
    work = (traces.copy(0, 400_000, 10_000_000), traces.kernel("gemm", 400_000, 600_000))
    abstains = ask(
        pageable_copy.RULE, runs.foreign(tmp_path / "none", traces.trace(traces.step(0, 0, MS), *work, world_size=1))
    )
    assert (abstains.state, "does not link" in abstains.why) == ("not_measured", True)


# -- copies that are waited for


def batches(folder: Path, *, waits: bool = True, kinds: str = PINNED, launch: int = 2) -> Path:
    """Trace ten steps of 8 ms and `launch`: 7 ms of computing, launched `launch` ms after its batch's copy of 1 ms.

    That copy begins when the device is done with the step before.
    """
    events: list[Any] = []
    step = (8 + launch) * MS
    for n in range(10):
        at, id_ = n * step, 10 * n + 1
        copied = at + 7 * MS  # where what was launched at the end of the step before ends
        until = copied + 1 * MS + 10 * US
        held = until - at
        launched = at + step - 10 * US if launch else until + 40 * US
        events += [
            traces.step(n, at, step),
            traces.op("aten::to", at, held + 20 * US if waits else 20 * US),
            traces.op("aten::copy_", at + US, held + 10 * US if waits else 15 * US),
            traces.call("cudaMemcpyAsync", at + 2 * US, 5 * US, id_),
            traces.copy(copied, 1 * MS, 10_000_000, kinds, id_),
            *([traces.call("cudaStreamSynchronize", at + 8 * US, held - 8 * US, id_ + 1)] if waits else []),
            traces.launched("gemm", launched, at + step + 2 * US, 7 * MS - 4 * US, id_ + 2),
        ]
    facts = {"device": {"type": "cuda"}, "loaders": [{"role": "train", "pin_memory": True}]}
    return runs.recorded(folder, (traces.trace(*events, world_size=1), [], facts))


# Which rule finds a wait for a copy, which is found once: not by that of other waits.
WAITS: dict[str, tuple[dict[str, Any], str]] = {
    "the device runs dry behind a pinned copy": ({}, "blocking_copy"),
    "it is pageable": ({"kinds": PAGEABLE}, "pageable_copy"),
    "it is only queued": ({"waits": False}, ""),
    "the wait leaves no gap": ({"launch": 0}, ""),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_copy_that_is_waited_for_is_found_once_where(tmp_path: Path, name: str) -> None:
    how, finds = WAITS[name]
    path = batches(tmp_path, **how)
    for found in ask_all((blocking_copy.RULE, host_sync.RULE, pageable_copy.RULE), path):
        assert found.state == ("found" if found.id == finds else "clear"), found.id
        if found.id == finds == "blocking_copy":
            assert found.saving_ns == pytest.approx(2 * MS, rel=0.02)
            assert found.summary.startswith("Once a step rank 0 waits")
            assert (found.ranks, found.changes[0].settings) == ((0,), (Setting("non_blocking", None, True),))
            assert "(`pin_memory` is True)" in found.advice[0]
            assert found.evidence is not None
            assert found.evidence.rows[0][:2] == ("HtoD", "pinned")


# -- activations that are computed twice


def recomputing(folder: Path, events: list[Any], peak: int = 20) -> Outcome:
    """Ask about a job whose block moves 90 GB a step, with so much memory allocated at its peak, GB."""
    path = runs.recorded(folder / "run", (traces.trace(*events, world_size=1), [], GPU))
    write(path, [reading(n, 10 * GB, peak_allocated_bytes=peak * GB, peak_reserved_bytes=peak * GB) for n in range(9)])
    zero = dict.fromkeys(("forward_flops", "recompute_flops", "backward_flops", "sharded"), 0)
    rows = [
        {"path": name, "kind": kind, "parameters": 1, "parameter_bytes": 4, "bucket": -1, "moved_bytes": size, **zero}
        for name, kind, size in (("", "Net", 0), ("block", "Block", 90 * GB))
    ]
    (path / "ranks/00000/modules.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ask(needless_recompute.RULE, path)


@pytest.mark.parametrize(
    ("peak", "again", "state"), [(20, True, "found"), (70, True, "clear"), (20, False, "clear")],
    ids=["they fit", "they may not fit", "none is computed again"],
)  # fmt: skip
def test_activations_are_kept_where(tmp_path: Path, peak: int, again: bool, state: str) -> None:
    """Steps of 10 ms: a block of 3 ms forward, again 3 ms in its backward function, and 3 ms of that itself."""
    events: list[Any] = []
    for n in range(4):
        at, ids = 10 * n * MS, 100 * n
        events += [
            traces.step(n, at, 10 * MS),
            layers.called("", "Net", at + 10 * US, 400 * US),
            layers.called("block", "Block", at + 20 * US, 300 * US),
            layers.forward("linear", at + 30 * US, 100 * US, 5),
            traces.launched("gemm", at + 40 * US, at + 50 * US, 3 * MS, ids + 1),
            layers.function("CheckpointFunctionBackward", at + 600 * US, 900 * US, 5, traces.AUTOGRAD),
            traces.call("cudaLaunchKernel", at + 1_300 * US, 5 * US, ids + 3, tid=traces.AUTOGRAD),
            traces.kernel("dgrad", at + 6_050 * US, 3 * MS, ids + 3),
            traces.call("cudaDeviceSynchronize", at + 1_600 * US, 7_460 * US, ids + 4),
        ]
        if again:
            events += [
                layers.called("block", "Block", at + 610 * US, 500 * US, traces.AUTOGRAD),
                traces.op("aten::linear", at + 620 * US, 100 * US, traces.AUTOGRAD),
                traces.call("cudaLaunchKernel", at + 630 * US, 5 * US, ids + 2, tid=traces.AUTOGRAD),
                traces.kernel("gemm", at + 3_050 * US, 3 * MS, ids + 2),
            ]
    found = recomputing(tmp_path, events, peak)
    assert found.state == state
    if state == "found":  # the block's kernel runs once and not twice: 3 of 10 ms
        assert found.saving_ns == pytest.approx(3 * MS, rel=0.05)
        assert ("block" in found.summary, "30 GB at most" in found.summary) == (True, True)


@pytest.mark.parametrize(
    ("left", "again", "state"), [(2, True, "found"), (0.2, True, "clear"), (2, False, "clear")],
    ids=["they fit", "they may not fit", "none is computed again"],
)  # fmt: skip
def test_on_a_cpu_activations_are_kept_where(tmp_path: Path, left: float, again: bool, state: str) -> None:
    """Steps of 10 ms on one thread: a block of 3 ms forward, again 3 ms in the backward pass, and 3 ms of that."""
    events: list[Any] = []
    for n in range(4):
        at = 10 * n * MS
        events += [
            traces.step(n, at, 10 * MS),
            layers.called("", "Net", at, 3 * MS),
            layers.called("block", "Block", at, 3 * MS),
            layers.forward("linear", at, 3 * MS, 5),
            layers.function("CheckpointFunctionBackward", at + 3 * MS, 6 * MS, 5),
            traces.op("aten::mm", at + 6 * MS, 3 * MS),
        ]
        if again:
            events += [layers.called("block", "Block", at + 3 * MS, 3 * MS)]
        events += [traces.op("aten::linear", at + 3 * MS, 3 * MS)]
    steps = [runs.light(n, 10 * MS, forward_ns=3 * MS, backward_ns=6 * MS) for n in range(20)]
    path = runs.recorded(tmp_path / "run", (traces.trace(*events, world_size=1, device=""), steps, runs.CPU))
    readings.write(path / "hosts/node-1/host.jsonl", [{"memory_available_bytes": left * GB}] * 40)
    found = ask(needless_recompute.RULE, path)
    assert found.state == state, (found.why, found.summary)
    if state == "found":
        assert found.saving_ns == pytest.approx(3 * MS, rel=0.1)
        assert "block" in found.summary


@pytest.mark.parametrize(("saves", "gain"), [(False, 500), (True, 500 + 280 + 0.3 * 590 + 0.45 * 400)])
def test_the_hosts_own_work_for_it_goes_too(tmp_path: Path, saves: bool, gain: float) -> None:
    """Of steps of 2 ms that wait for their host: 500 µs in which a block runs again, up to the operators around it, and
    280 µs between two blocks in which their input is kept for that; then also the hooks of what the blocks save, in
    590 µs of their forward pass and 400 of their backward pass.
    """
    events: list[Any] = []
    for n in range(4):
        at, ids = 2 * n * MS, 100 * n
        events += [
            traces.step(n, at, 2 * MS),
            layers.called("", "Net", at + 10 * US, 890 * US),
            layers.called("block", "Block", at + 20 * US, 300 * US),
            layers.forward("linear", at + 30 * US, 200 * US, 10 * n + 5),
            traces.launched("gemm", at + 40 * US, at + 50 * US, 5 * US, ids + 1),
            *([traces.op("_NoopSaveInputs", at + 400 * US, 10 * US)] if saves else []),
            layers.called("block", "Block", at + 600 * US, 290 * US),
            layers.function("AddmmBackward0", at + 1_000 * US, 900 * US, 10 * n + 5),
            traces.op("aten::sum", at + 1_010 * US, 90 * US),
            layers.called("block", "Block", at + 1_200 * US, 300 * US),
            traces.op("aten::linear", at + 1_210 * US, 100 * US),
            traces.call("cudaLaunchKernel", at + 1_230 * US, 5 * US, ids + 2),
            traces.kernel("gemm", at + 1_240 * US, 5 * US, ids + 2),
            traces.op("aten::mm", at + 1_600 * US, 290 * US),
            traces.call("cudaLaunchKernel", at + 1_610 * US, 5 * US, ids + 3),
            traces.kernel("dgrad", at + 1_620 * US, 5 * US, ids + 3),
        ]
    found = recomputing(tmp_path, events)
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(gain * US, rel=0.05)
