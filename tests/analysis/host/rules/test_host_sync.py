"""Waiting for the device: found with its cure, silent where the device has enough queued, abstaining on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.rules.host_sync import RULE
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

US = 1_000


def traced(folder: Path, queued: bool) -> Path:
    """Trace ten steps of 10 ms: 8 ms of work, a .item() in its middle, and then 2 ms until the host has launched again.

    Where it is queued, the device has that work already when the host waits.
    """
    events: list[object] = []
    for n in range(10):
        at, id_ = n * 10 * MS, 10 * n
        relaunch = at + 20 * US if queued else at + 6 * MS
        resume = at + 4 * MS + 20 * US if queued else at + 6 * MS + 10 * US
        events += [
            traces.step(n, at, 10 * MS),
            traces.launched("gemm", at, at + 10 * US, 4 * MS, id_ + 1),
            traces.op("aten::item", at + 1 * MS, 3 * MS + 40 * US),
            traces.call("cudaStreamSynchronize", at + 1 * MS, 3 * MS + 30 * US, id_ + 2),
            traces.launched("gemm", relaunch, resume, at + 10 * MS - resume, id_ + 3),
        ]
    return runs.foreign(folder / "traces", traces.trace(*events, world_size=1))  # type: ignore[arg-type]


def test_reading_a_value_in_every_step_is_found(tmp_path: Path) -> None:
    found = ask(RULE, traced(tmp_path, queued=False))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(2 * MS, rel=0.02)
    assert found.share == pytest.approx(0.2, rel=0.02)
    assert found.summary.startswith("Once a step rank 0 waits")
    assert ".item()" in found.advice[0]
    assert found.evidence is not None
    assert found.evidence.rows[0][:2] == ("aten::item", "cudaStreamSynchronize")


def test_gradscalers_own_reading_is_not_the_scripts(tmp_path: Path) -> None:
    """As torch traces it: infinities looked for, found_inf read, and the optimizer's step next to it."""
    found = ask(RULE, runs.foreign(tmp_path / "traces", scaled()))
    assert found.state == "found"
    assert found.title.startswith("GradScaler")
    assert "fused=True" in found.advice[0]
    assert len(found.advice) == 1
    assert found.evidence is not None
    assert found.evidence.rows[0][:2] == ("GradScaler.step", "cudaStreamSynchronize")


def test_an_optimizer_that_cannot_be_fused_is_not_told_to_be(tmp_path: Path) -> None:
    for name, sets in (("RMSprop", []), ("SGD", ["fused"])):
        facts = {"device": {"type": "cuda"}, "optimizers": [{"class": name, "parameters": 9}]}
        found = ask(RULE, runs.recorded(tmp_path / name, (scaled(), [], facts)))
        assert [setting.name for change in found.changes for setting in change.settings] == sets


def scaled() -> dict[str, Any]:
    """Return a trace of ten steps of GradScaler's."""
    events: list[object] = []
    for n in range(10):
        at, id_ = n * 10 * MS, 10 * n
        done = at + 4 * MS
        events += [
            traces.step(n, at, 10 * MS),
            traces.launched("gemm", at, at + 10 * US, 4 * MS, id_ + 1),
            traces.op("aten::_amp_foreach_non_finite_check_and_unscale_", at + 900 * US, 50 * US),
            traces.op("aten::item", at + 1 * MS, 3 * MS + 40 * US),
            traces.call("cudaStreamSynchronize", at + 1 * MS, 3 * MS + 30 * US, id_ + 2),
            traces.annotation("Optimizer.step#SGD.step", done + 100 * US, 5 * MS),
            traces.launched("update", at + 6 * MS, at + 6 * MS + 10 * US, 4 * MS - 10 * US, id_ + 3),
        ]
    return traces.trace(*events, world_size=1)  # type: ignore[arg-type]


def test_a_wait_behind_which_the_device_has_work_is_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, traced(tmp_path, queued=True)).state == "clear"


def test_a_script_that_never_waits_is_left_alone(tmp_path: Path) -> None:
    made = traces.trace(
        *(traces.step(n, n * 10 * MS, 10 * MS) for n in range(10)),
        *(traces.launched("gemm", n * 10 * MS, n * 10 * MS + 10 * US, 9 * MS, n + 1) for n in range(10)),
        world_size=1,
    )
    assert ask(RULE, runs.foreign(tmp_path / "traces", made)).state == "clear"


def test_on_the_cpu_it_abstains(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [runs.light(n, MS) for n in range(30)], runs.CPU))
    answer = ask(RULE, path)
    assert (answer.state, "on the CPU" in answer.why) == ("does_not_apply", True)
