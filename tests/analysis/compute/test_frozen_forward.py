"""A part of the model that is not trained, and does not change, is found with what its forward pass takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.analysis.compute.rules.frozen_forward import RULE
from tests.fixtures import layers, runs, traces
from tests.fixtures.asking import ask

US = 1_000
STEP_US = 1_000


def step(*, trained: bool) -> list[dict[str, Any]]:
    """Return a step of 1 ms on a CPU: two Linears, of which the second, or both, have a backward pass."""
    both = [layers.function("AddmmBackward0", 500 * US, 300 * US, 6), traces.op("aten::mm", 505 * US, 200 * US)]
    return [
        traces.step(0, 0, STEP_US * US),
        layers.called("", "Net", 0, 400 * US),
        layers.called("backbone", "Linear", 10 * US, 300 * US),
        layers.forward("addmm", 20 * US, 280 * US, 6),
        layers.called("head", "Linear", 320 * US, 50 * US),
        layers.forward("addmm", 330 * US, 30 * US, 7),
        layers.function("AddmmBackward0", 410 * US, 60 * US, 7),
        traces.op("aten::mm", 415 * US, 40 * US),
        *(both if trained else ()),
    ]


def told(*parts: tuple[str, bool | None]) -> list[dict[str, Any]]:
    return [{"module": module, "changes": changes} for module, changes in parts]


@pytest.mark.parametrize(
    ("frozen", "trained", "state"),
    [
        pytest.param(told(("backbone", False)), False, "found", id="frozen"),
        pytest.param(told(("backbone", True)), False, "clear", id="an average of others"),
        pytest.param(told(("backbone", None)), False, "clear", id="not known"),
        pytest.param(told(("backbone", False)), True, "clear", id="what is before it is trained"),
        pytest.param(told(), False, "clear", id="nothing is frozen"),
        pytest.param(None, False, "not_measured", id="not recorded"),
    ],
)
def test_what_is_not_trained(tmp_path: Path, frozen: Any, trained: bool, state: str) -> None:
    steps = [runs.light(n, STEP_US * US) for n in range(20)]
    facts = {**runs.CPU, "frozen": frozen}
    found = ask(RULE, runs.recorded(tmp_path / "run", (layers.on_cpu(step(trained=trained)), steps, facts)))
    assert found.state == state, found
    if state == "found":
        assert found.saving_ns == pytest.approx(300 * US, rel=0.02)
        assert found.at_most
        assert "`backbone`" in found.changes[0].text


@pytest.mark.parametrize(
    ("length", "more", "state"),
    [
        (160, {}, "clear"),
        (80, {}, "found"),
        (1_600, {}, "found"),
        (320, {"replicas": 2}, "clear"),
        (160, {"iterable": True}, "found"),
    ],
)
def test_samples_that_come_once_are_not_computed_again(tmp_path: Path, length: int, more: Any, state: str) -> None:
    steps = [runs.light(n, STEP_US * US, samples=8) for n in range(20)]
    loaders = [{"role": "train", "dataset_length": length, **more}]
    facts = {**runs.CPU, "frozen": told(("backbone", False)), "loaders": loaders}
    folder = runs.recorded(tmp_path / "run", (layers.on_cpu(step(trained=False)), steps, facts))
    assert ask(RULE, folder).state == state


def copied(model: Any, other: Any) -> None:
    model.load_state_dict(other.state_dict())


def moved(model: Any, other: Any) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = 0.9 * mine.data + 0.1 * theirs.data


def averaged(model: Any, other: Any) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.mul_(0.9).add_(theirs.data, alpha=0.2)


@pytest.mark.parametrize(
    ("of", "update", "parts"),
    [
        ("all", None, [("(Sequential)", False)]),
        ("all", copied, [("(Sequential)", True)]),
        ("all", moved, [("(Sequential)", True)]),
        ("all", averaged, [("(Sequential)", True)]),
        ("first", None, [("0", False)]),
        ("first", copied, [("0", True)]),
        ("small", None, []),
        ("none", None, []),
    ],
)
def test_which_parts_are_frozen_and_whether_they_change(
    of: str, update: Callable[[Any, Any], None] | None, parts: list[tuple[str, bool]]
) -> None:
    torch = pytest.importorskip("torch")
    from dlprof.record.collectors.facts import Facts

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(64, 64)))
    model.append(torch.nn.Linear(64, 1))
    {"all": model, "first": model[0], "small": model[2], "none": torch.nn.ReLU()}[of].requires_grad_(False)
    collector = Facts()
    reference = SimpleNamespace(model=model)
    models: list[Callable[[], Any]] = [lambda: reference.model]
    collector._frozen_parts(models)
    if update is not None:
        with torch.no_grad():
            update(model, copy.deepcopy(model))
    assert collector._frozen_parts(models) == told(*parts)
    reference.model = None  # the job ends
    assert collector._frozen_parts(models) == told(*parts)


def test_a_twin_of_what_is_trained_may_be_its_average() -> None:
    torch = pytest.importorskip("torch")
    from dlprof.record.collectors.facts import _weights

    there, here = torch.zeros(4, device="meta"), torch.zeros(4)
    assert _weights([there], twin=True) is None
    assert _weights([there], twin=False) is not None
    assert _weights([here], twin=True) is not None
    with torch.inference_mode():
        assert _weights([torch.zeros(4)], twin=False) is None


def test_a_part_that_is_trained_from_some_step_on_is_frozen_no_more() -> None:
    torch = pytest.importorskip("torch")
    from dlprof.record.collectors.facts import Facts

    model, collector = torch.nn.Linear(8, 8).requires_grad_(False), Facts()
    assert collector._frozen_parts([lambda: model]) == told(("(Linear)", False))
    model.requires_grad_()
    assert collector._frozen_parts([lambda: model]) == []
