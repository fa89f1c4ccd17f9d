"""Waiting for the host: found on a GPU and on a CPU, silent on a busy device, abstaining where steps are not marked."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.rules.host_bound import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.phases import called_again
from tests.fixtures.runs import MS


def launching(folder: Path, gap: int, steps: bool = True) -> Path:
    """Write three steps of 1 ms of ten kernels; each is launched `gap` ns after the one before had ended."""
    events: list[Any] = []
    for n in range(3):
        events += [traces.step(n, n * MS, MS)] if steps else []
        for i in range(10):
            at = n * MS + i * 100_000
            events += traces.launched("small", at + gap - 5_000, at + gap, 100_000 - gap, 1 + 10 * n + i)
    return runs.foreign(folder, traces.trace(*events, world_size=1))


def test_gaps_before_late_launches_are_found(tmp_path: Path) -> None:
    found = ask(RULE, launching(tmp_path, 40_000))
    assert found.state == "found"
    assert found.share == pytest.approx(0.4, abs=0.02)
    assert found.changes[0].settings == (Setting("mode", None, "reduce-overhead"),)
    assert "10 kernels of 60.0 µs each" in found.summary
    assert found.evidence is not None
    assert all(isinstance(row[-1], float) for row in found.evidence.rows)
    assert "the true share is smaller" in found.sure


@pytest.mark.parametrize(
    ("same", "title"), [(True, "called again and again"), (False, "launches the forward and backw")]
)
def test_a_model_that_is_called_for_each_sample_is_told_to_be_called_once(
    tmp_path: Path, same: bool, title: str
) -> None:
    found = ask(RULE, runs.foreign(tmp_path, called_again(5, same=same)))
    assert title in found.title
    assert ("one call for all" in found.advice[0]) == same
    assert ("5 times for each backward pass" in found.summary) == same


def test_a_busy_device_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, launching(tmp_path, 6_000))
    # Ten gaps of 6 µs in 1 ms, of which a µs each stays.
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.05, abs=0.01)
    assert clear.ranks == (0,)


def test_a_device_that_runs_next_to_nothing_abstains(tmp_path: Path) -> None:
    events = [
        [traces.step(n, n * MS, MS), *traces.launched("gemm", n * MS, n * MS + 5_000, 9_000, n + 1)] for n in range(3)
    ]
    answer = ask(RULE, runs.foreign(tmp_path, traces.trace(*events, world_size=1)))
    assert (answer.state, "that is no training" in answer.why) == ("not_measured", True)


def test_unmarked_steps_abstain(tmp_path: Path) -> None:
    answer = ask(RULE, launching(tmp_path, 40_000, steps=False))
    assert (answer.state, "nothing marks the steps" in answer.why) == ("not_measured", True)


def test_python_between_the_steps_of_a_cpu_run_is_found(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(3):
        t = n * 10 * MS
        events += [
            traces.step(n, t, 10 * MS),
            traces.annotation("dlprof::forward", t, 6 * MS),
            traces.op("aten::mm", t, 6 * MS),
        ]
    made = traces.trace(*events, device="", backend="", world_size=1)
    steps = [runs.light(n, 10 * MS, forward_ns=6 * MS) for n in range(30)]
    found = ask(RULE, runs.recorded(tmp_path / "run", (made, steps, runs.CPU)))
    assert found.state == "found"
    assert found.share == pytest.approx(0.4)
    assert found.title == "Python holds up the step"
    assert "out of the loop" in found.advice[0]
    # With no loader seen, and much time before the forward, data may come in there.
    steps = [step | {"fetches": 0, "lead_ns": 3 * MS} for step in steps]
    found = ask(RULE, runs.recorded(tmp_path / "unfed", (made, steps, runs.CPU)))
    assert "3.00 ms pass before the first forward, in no loader" in found.advice[0]


def stepping(folder: Path, **optimizer: Any) -> set[str]:
    """Return what the advice sets for a CPU run of whose steps Python in the optimizer takes 40 %."""
    events: list[Any] = []
    for n in range(3):
        t = n * 10 * MS
        events += [
            traces.step(n, t, 10 * MS),
            traces.annotation("dlprof::forward", t, 6 * MS),
            traces.op("aten::mm", t, 6 * MS),
            traces.annotation("dlprof::optimizer", t + 6 * MS, 4 * MS),
        ]
    made = traces.trace(*events, device="", backend="", world_size=1)
    steps = [runs.light(n, 10 * MS, forward_ns=6 * MS, optimizer_ns=4 * MS) for n in range(30)]
    found = ask(RULE, runs.recorded(folder / "run", (made, steps, {**runs.CPU, "optimizers": [optimizer]})))
    assert found.state == "found"
    return {setting.name for change in found.changes for setting in change.settings}


@pytest.mark.parametrize(
    ("optimizer", "advised"),
    [
        ({"class": "AdamW"}, {"fused"}),
        ({"class": "LBFGS"}, set()),
        ({"class": "RMSprop"}, set()),
        ({"class": "AdamW", "takes": ["foreach"]}, set()),
        ({"class": "Mine", "takes": ["fused"]}, {"fused"}),
    ],
)
def test_a_fused_optimizer_is_advised_where_there_is_one(
    tmp_path: Path, optimizer: dict[str, Any], advised: set[str]
) -> None:
    assert stepping(tmp_path, fused=None, parameters=9, **optimizer) == advised


def test_without_a_trace_it_abstains(tmp_path: Path) -> None:
    steps = [runs.light(n, 10 * MS) for n in range(30)]
    assert ask(RULE, runs.recorded(tmp_path / "run", (None, steps, runs.CPU))).state == "not_measured"
