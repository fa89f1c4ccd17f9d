"""Copies that are waited for: found where the device then runs dry; pinned and queued, or pageable, left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.host.rules import host_sync
from dlprof.analysis.memory.rules import blocking_copy, pageable_copy
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

US = 1_000


def batches(
    folder: Path,
    *,
    waits: bool = True,
    kinds: str = "HtoD (Pinned -> Device)",
    launch: int = 2,
    pin: bool | None = None,
) -> Path:
    """Trace ten steps of 8 ms and `launch`: 7 ms of computing, launched `launch` ms after its batch's copy of 1 ms.

    That copy begins when the device is done with the step before.
    """
    events: list[object] = []
    step = (8 + launch) * MS
    for n in range(10):
        at, id_ = n * step, 10 * n + 1
        copied = at + 7 * MS  # where what was launched at the end of the step before ends
        until = copied + 1 * MS + 10 * US
        held = until - at
        events += [
            traces.step(n, at, step),
            traces.op("aten::to", at, held + 20 * US if waits else 20 * US),
            traces.op("aten::copy_", at + US, held + 10 * US if waits else 15 * US),
            traces.call("cudaMemcpyAsync", at + 2 * US, 5 * US, id_),
            traces.copy(copied, 1 * MS, 10_000_000, kinds, id_),
            *([traces.call("cudaStreamSynchronize", at + 8 * US, held - 8 * US, id_ + 1)] if waits else []),
            traces.launched(
                "gemm", at + step - 10 * US if launch else until + 40 * US, at + step + 2 * US, 7 * MS - 4 * US, id_ + 2
            ),
        ]
    made = traces.trace(*events, world_size=1)  # type: ignore[arg-type]
    if pin is None:
        return runs.foreign(folder / "traces", made)
    facts = {"device": {"type": "cuda"}, "loaders": [{"role": "train", "pin_memory": pin}]}
    return runs.recorded(folder / "run", (made, [], facts))


def test_a_device_that_runs_dry_behind_a_copy_is_found(tmp_path: Path) -> None:
    found = ask(blocking_copy.RULE, batches(tmp_path, pin=True))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(2 * MS, rel=0.02)
    assert found.summary.startswith("Once a step rank 0 waits until a copy from pinned memory is done")
    assert found.ranks == (0,)
    assert found.changes[0].settings == (Setting("non_blocking", None, True),)
    assert "(`pin_memory` is True)" in found.advice[0]
    assert found.evidence is not None
    assert found.evidence.rows[0][:2] == ("HtoD", "pinned")


def test_it_is_found_once(tmp_path: Path) -> None:
    """Waiting for the device is another rule's business, but for these copies."""
    assert ask(host_sync.RULE, batches(tmp_path)).state == "clear"
    pageable = batches(tmp_path / "pageable", kinds="HtoD (Pageable -> Device)")
    assert ask(pageable_copy.RULE, pageable).state == "found"
    assert ask(host_sync.RULE, pageable).state == ask(blocking_copy.RULE, pageable).state == "clear"


def test_a_copy_that_is_only_queued_is_left_alone(tmp_path: Path) -> None:
    assert ask(blocking_copy.RULE, batches(tmp_path, waits=False)).state == "clear"


def test_a_wait_that_leaves_no_gap_is_left_alone(tmp_path: Path) -> None:
    clear = ask(blocking_copy.RULE, batches(tmp_path, launch=0))
    assert (clear.state, clear.share) == ("clear", 0)
    assert "waited for a copy" in clear.summary


def test_on_the_cpu_it_abstains(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [runs.light(n, MS) for n in range(30)], runs.CPU))
    answer = ask(blocking_copy.RULE, path)
    assert (answer.state, "on the CPU" in answer.why) == ("does_not_apply", True)
