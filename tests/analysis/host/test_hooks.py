"""What the backward pass does besides its own, traced by torch: hooks that read values, and anomaly mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.segments import ANOMALY, HOOK, Loop, hook_loops
from tests.fixtures import operators

torch: Any = pytest.importorskip("torch")

LAYERS = 12


def loops(
    folder: Path, hook: Callable[[Any], Any] | None, *, hooked: int = 2 * LAYERS, twice: bool = False
) -> list[Loop]:
    """Return what is found where a hook is on so many parameters, and a model is called once, or twice."""
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(LAYERS)))
    for parameter in [*model.parameters()][:hooked] if hook else ():
        parameter.register_hook(hook)
    x = torch.randn(4, 16)

    def run() -> None:
        loss = model(x).sum() + (model(x).sum() if twice else 0)
        loss.backward()

    return operators.profiled(torch, folder, run).once(hook_loops)


def reads(gradient: Any) -> None:
    gradient.norm().item()


def test_hooks_that_read_values(tmp_path: Path) -> None:
    (loop,) = loops(tmp_path, reads, twice=True)
    assert (loop.after, loop.turns) == (HOOK, 2 * LAYERS)
    assert {"aten::linalg_vector_norm", "aten::item"} == set(loop.names)


def test_hooks_on_modules_do_so_too(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(20)))
    for module in model:
        module.register_full_backward_hook(lambda _module, _inputs, outputs: reads(outputs[0]))
    x = torch.randn(4, 16, requires_grad=True)
    (loop,) = operators.profiled(torch, tmp_path, lambda: model(x).sum().backward()).once(hook_loops)
    assert loop.turns == 20


@pytest.mark.parametrize(
    ("hook", "hooked"), [(None, 0), (reads, 15), (lambda gradient: gradient.clamp(-1, 1), 2 * LAYERS)]
)
def test_gradients_that_are_summed_a_few_hooks_and_such_that_wait_for_nothing_are_none(
    tmp_path: Path, hook: Callable[[Any], Any] | None, hooked: int
) -> None:
    assert loops(tmp_path, hook, hooked=hooked, twice=True) == []


def test_anomaly_mode_is_told_from_hooks(tmp_path: Path) -> None:
    with torch.autograd.set_detect_anomaly(True):
        (checks,) = loops(tmp_path, None)
    assert {*ANOMALY, "aten::item"} <= checks.inner
    assert checks.turns > 2 * LAYERS
