"""The script's lines between the phases: found with what each takes, silent where little, abstaining without stacks."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.rules.step_python import RULE
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.phases import US, trained
from tests.fixtures.runs import A100, MS, light
from tests.fixtures.sampled_stacks import MAIN

LOGGING = f"{MAIN};main (/me/train.py:70) 60\n{MAIN};main (/me/train.py:71) 40\n"


def recorded(folder: Path, between: int, stacks: str = LOGGING, **facts: Any) -> Path:
    """Record 50 steps of 20 ms, so many of them between the phases."""
    steps = [light(n, 20 * MS, forward_ns=5 * MS, backward_ns=(15 - between) * MS) for n in range(50)]
    path = runs.recorded(folder / "run", (None, steps, {**runs.CPU, "pid": 10, **facts}))
    if stacks:
        (path / "ranks/00000/stacks.txt.gz").write_bytes(gzip.compress(stacks.encode()))
    return path


def test_lines_that_log_in_every_step_are_found(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 5))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(5 * MS)
    assert found.evidence is not None
    assert [row[0] for row in found.evidence.rows] == ["main (train.py:70)", "main (train.py:71)"]
    assert [row[1] for row in found.evidence.rows] == [pytest.approx(3 * MS), pytest.approx(2 * MS)]


def test_a_little_between_the_phases_is_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, 0)).state == "clear"
    thin = "".join(f"{MAIN};f{n} (/me/train.py:{n + 1}) 4\n" for n in range(25))
    assert ask(RULE, recorded(tmp_path / "thin", 5, thin)).state == "clear"


def test_a_loss_is_training(tmp_path: Path) -> None:
    loss = "cross_entropy (/lib/python3.11/site-packages/torch/nn/functional.py:9)"
    answer = ask(RULE, recorded(tmp_path, 5, f"{MAIN};main (/me/train.py:50);{loss} 100\n"))
    assert answer.state == "not_measured"


def test_without_stacks_it_abstains(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, 5, "")).state == "not_measured"


def test_on_a_device_it_needs_a_trace(tmp_path: Path) -> None:
    path = recorded(tmp_path, 5, device=A100)
    assert ask(RULE, path).state == "not_measured"


@pytest.mark.parametrize(
    ("lead", "stacks"), [(0, ""), (1_900, f"{MAIN};main (/me/train.py:3);augment (/me/a.py:7) 40\n")]
)
def test_on_a_device_the_function_is_named_and_a_loader_where_batches_may_be_made(
    tmp_path: Path, lead: int, stacks: str
) -> None:
    """Steps of 4.2 ms, 2 of them before the optimizer or before the forward pass."""
    took = {"forward_ns": MS, "backward_ns": MS, "optimizer_ns": 100 * US, "lead_ns": lead * US}
    steps = [light(n, 4_200 * US, profiled=int(n < 5), fetches=0, **took) for n in range(50)]
    made = trained(length=4_200 * US)
    path = runs.recorded(tmp_path / "run", (made, steps, {**runs.GPU, "pid": 10}))
    if stacks:
        (path / "ranks/00000/stacks.txt.gz").write_bytes(gzip.compress(stacks.encode()))
    found = ask(RULE, path)
    assert (found.state, found.at_most) == ("found", True)
    what = "`augment (a.py:7)`" if stacks else "this"
    assert found.advice[0] == f"take {what} out of the loop, or do it every k steps; keep metrics as tensors"
    assert [text.partition(" (")[0] for text in found.advice[1:]] == ["batches that are made there"] * (lead > 0)


def test_what_varies_too_much_between_the_steps_is_not_told(tmp_path: Path) -> None:
    events: list[Any] = []
    for n, busy in enumerate((0.99, 0.1, 0.99)):
        t, length = n * MS, int(busy * MS) // 10
        events.append(traces.step(n, t, MS))
        for i in range(10):
            events += traces.launched("gemm", t + i * 5_000, t + 5_000 + i * length, length, 1 + 10 * n + i)
    answer = ask(RULE, runs.foreign(tmp_path, traces.trace(*events, world_size=1)))
    assert (answer.state, "varies too much" in answer.why) == ("not_measured", True)
