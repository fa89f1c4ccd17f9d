"""Outputs that are differentiated one variable at a time: counted in a real job, and what that may cost a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.rules import repeated_derivatives
from tests.fixtures import runs
from tests.fixtures.jobs import facts, launch, wrapped
from tests.fixtures.ruled import Case, check, clear, found, jobs, unmeasured
from tests.fixtures.runs import MS
from tests.fixtures.sampled_stacks import MAIN, burst

JOB = """
import sys
import torch
from torch import nn

torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)


def grad(of, by):
    return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)


for _ in range(12):
    x, y, t = (torch.rand(16, requires_grad=True) for _ in range(3))
    u, v = net(torch.stack([x, y, t], -1)).unbind(-1)
    if "fixed" in sys.argv:
        (u_x, u_y, u_t), (v_x, v_y, v_t) = grad(u, (x, y, t)), grad(v, (x, y, t))
    else:
        (u_x,), (u_y,), (u_t,), (v_x,), (v_y,), (v_t,) = (grad(of, (by,)) for of in (u, v) for by in (x, y, t))
    optimizer.zero_grad()
    torch.autograd.backward(tensors=sum(one.square().mean() for one in (u_x, u_y, u_t, v_x, v_y, v_t)))
    optimizer.step()
"""


@pytest.mark.parametrize(("how", "calls"), [("plain", 7), ("fixed", 3)])
def test_what_a_step_differentiates_is_counted(how: str, calls: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOB)
    command = wrapped(tmp_path / "run", [sys.executable, tmp_path / "train.py", how], "--flops", "on", "--no-trace")
    assert launch(command, tmp_path).returncode == 0
    assert facts(tmp_path / "run/ranks/00000")["flops"]["derivatives"] == {"calls": calls, "outputs": 3}


TRAIN = f"{MAIN};<module> (/me/train.py:70)"
GRAD = "grad (/lib/python3/site-packages/torch/autograd/__init__.py:9)"
BACKWARD = "backward (/lib/python3/site-packages/torch/_tensor.py:9)"
LINES = [["/me/train.py", 28, "out = torch.autograd.grad(value, x)"], ["/me/train.py", 77, "loss.backward()"]]


def differentiating(folder: Path, calls: int, outputs: int, grads: bool = True, counted: bool = True) -> Path:
    """Record steps of 100 ms, of which backward passes and derivatives take 60."""
    steps = [runs.light(n, 100 * MS, forward_ns=30 * MS, backward_ns=60 * MS) for n in range(40)]
    flops: dict[str, Any] = {"derivatives": {"calls": calls, "outputs": outputs}} if counted else {}
    told = {**runs.CPU, "pid": 10, "directory": "/me/", "flops": {"state": "counted", **flops}}
    stacks = {f"{TRAIN};step (/me/train.py:77);{BACKWARD}": 60}
    if grads:
        stacks[f"{TRAIN};step (/me/train.py:72);residuals (/me/train.py:38);derivative (/me/train.py:28);{GRAD}"] = 40
    return burst(runs.recorded(folder / "run", (None, steps, told)), stacks, lines=LINES)


of = jobs(differentiating)
CASES = {
    "sixteen of three": found(of(17, 8), 60 * MS * 9 / 17, "17 times", at_most=True, where=[("train.py", 28)]),
    "each once": clear(of(8, 8)),
    "a few losses": clear(of(4, 1)),
    "micro-batches of one loss": clear(of(17, 8, grads=False)),
    "not counted": unmeasured(of(17, 8, counted=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_repeated_derivatives(name: str, tmp_path: Path) -> None:
    case: Case = CASES[name]
    check(repeated_derivatives.RULE, case, tmp_path)
