"""Gradients that no optimizer uses and dense ones of large embeddings are found in a real job, and in none without."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.rules import dense_gradient, unused_gradients
from dlprof.analysis.modules.gradients import idle_gradients
from dlprof.record.model.parameters import Dropped
from tests.fixtures import layers, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.jobs import COMPILES_NOTHING, facts, launch, wrapped

JOB = """
import sys
import torch
from torch import nn

fixed = sys.argv[1] == "fixed"
torch.set_num_threads(1)
words = nn.Embedding(150_000, 64, sparse=fixed)
backbone = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
head = nn.Linear(64 + 256, 4)
if fixed:
    backbone.requires_grad_(False)
optimizer = torch.optim.SGD([*words.parameters(), *head.parameters()], lr=0.1)
for _ in range(40):
    x, n = torch.randn(128, 256), torch.randint(150_000, (128, 8))
    optimizer.zero_grad()
    head(torch.cat([words(n).mean(1), backbone(x)], 1)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize(("how", "state", "names"), [("plain", "found", ["(Sequential)"]), ("fixed", "clear", [])])
def test_wasted_gradients_of_a_real_job(tmp_path: Path, how: str, state: str, names: list[str]) -> None:
    (tmp_path / "train.py").write_text(COMPILES_NOTHING + JOB)
    command = wrapped(tmp_path / "run", [sys.executable, tmp_path / "train.py", how])
    assert launch(command, tmp_path).returncode == 0
    told = facts(tmp_path / "run/ranks/00000")["untrained"]
    assert [name for name in told if name.startswith("(")] == names
    unused, dense = (ask(one.RULE, tmp_path / "run") for one in (unused_gradients, dense_gradient))
    assert (unused.state, dense.state) == (state, state)
    if state == "found":
        assert not unused.at_most
        assert unused.saving_ns > 0
        assert "`Sequential`" in unused.changes[0].text
        assert "backbone(x)" in unused.where[0].what
        # Nothing is trained before the backbone: its backward pass is gone, and the embedding's and the head's is not.
        spared = {
            path.split(".")[0] for path in runs.measured(tmp_path / "run", idle_gradients).frame(idle_gradients)["path"]
        }
        assert spared == {"(Sequential)"}
        # SGD trains the same with sparse gradients: no change of the training.
        assert ("sparse=True" in dense.changes[0].text, dense.training) == (True, False)
        assert 0.2 < dense.share < 0.95
        # So does an optimizer of the table's own, whatever the other layers have.
        at, table = tmp_path / "run/ranks/00000/facts.json", 150_000 * 64 * 4
        known = json.loads(at.read_text())
        for classes, otherwise in ((("Adagrad", "AdamW"), False), (("AdamW", "Adagrad"), True)):
            sizes = zip(classes, (table, 9), strict=True)
            known["optimizers"] = [{"class": name, "bytes": size} for name, size in sizes]
            at.write_text(json.dumps(known))
            assert ask(dense_gradient.RULE, tmp_path / "run").changes[0].training == otherwise


ADAPTED = """
import sys
import torch
from torch import nn

torch.set_num_threads(1)

class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(256, 4, bias=False), nn.Linear(4, 256, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(500, 256)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)) for _ in range(4))

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return x

model = Net()
model.requires_grad_(sys.argv[1] != "fixed")
for layer in model.layers:
    layer[0] = Adapted(layer[0])
chosen = [p for name, p in model.named_parameters() if "down" in name or "up" in name]
optimizer = torch.optim.SGD(chosen, lr=0.1) if sys.argv[1] == "sgd" else torch.optim.Adam(chosen)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randint(500, (512,))).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("adam", "found"),
        pytest.param("sgd", "found", marks=pytest.mark.slow),
        pytest.param("fixed", "clear", marks=pytest.mark.slow),
    ],
)
def test_adapters_in_a_model_that_is_not_frozen(tmp_path: Path, how: str, state: str) -> None:
    (tmp_path / "train.py").write_text(COMPILES_NOTHING + ADAPTED)
    assert launch(wrapped(tmp_path / "run", [sys.executable, tmp_path / "train.py", how]), tmp_path).returncode == 0
    bases, norms = ([f"layers.{n}.{one}" for n in range(4)] for one in ("0.base", "1"))
    told = facts(tmp_path / "run/ranks/00000")["untrained"]
    assert sorted(told) == (sorted(["words", *bases, *norms]) if state == "found" else [])
    rule = ask(unused_gradients.RULE, tmp_path / "run")
    assert rule.state == state
    if state == "found":
        assert not rule.at_most
        assert "`model.requires_grad_(False)` before they are added" in rule.changes[0].text
        assert rule.where[0].what.startswith("optimizer = torch.optim.")
        assert 0.1 < rule.share < 0.5  # one of the three products of a base, and not the other two


def backward(*, products: int = 2) -> list[dict[str, Any]]:
    """Return a step of 1 ms on a CPU: a Linear between others, which computes so many products in its backward pass."""
    us = 1_000
    return [
        traces.step(0, 0, 1000 * us),
        layers.called("", "Net", 0, 300 * us),
        layers.called("a", "Linear", 10 * us, 200 * us),
        layers.forward("t", 12 * us, 5 * us, 5),
        layers.forward("addmm", 20 * us, 100 * us, 6),
        layers.called("b", "Linear", 220 * us, 50 * us),
        layers.forward("addmm", 230 * us, 30 * us, 7),
        layers.function("AddmmBackward0", 400 * us, 60 * us, 7),
        traces.op("aten::mm", 410 * us, 40 * us),
        layers.accumulates(460 * us, 10 * us),
        layers.function("AddmmBackward0", 500 * us, 300 * us, 6),
        *(traces.op("aten::mm", (505 + 60 * n) * us, 50 * us) for n in range(products)),
        traces.op("aten::sum", 700 * us, 30 * us),
        layers.accumulates(810 * us, 10 * us),
        layers.function("TBackward0", 830 * us, 5 * us, 5),
        layers.accumulates(840 * us, 20 * us),
    ]


@pytest.mark.parametrize(
    ("untrained", "products", "gone_us"),
    [
        (["a"], 2, 50 + 30 + 10 + 5 + 20),  # one of two products, the bias's sum, and what leads to both parameters
        (["a"], 1, 50 + 30 + 10 + 5 + 20),  # the only one is its own
        (["b"], 2, 40 + 10),
        ([], 2, 0),
    ],
)
def test_what_the_gradients_of_a_linear_take(
    tmp_path: Path, untrained: list[str], products: int, gone_us: float
) -> None:
    steps = [runs.light(n, 1_000_000) for n in range(5)]
    made = layers.on_cpu(backward(products=products))
    run = runs.recorded(tmp_path / "run", (made, steps, {**runs.CPU, "untrained": untrained}))
    found = runs.measured(run, idle_gradients).frame(idle_gradients)
    assert found["path"].tolist() == untrained
    assert found["gone_ns"].sum() == pytest.approx(gone_us * 1e3)
    assert found["gain_ns"].tolist() == pytest.approx([gone_us * 1e3] * len(untrained))


AGAINST = """
import contextlib, sys
import torch
from torch import nn

class Maker(nn.Sequential): pass
class Judge(nn.Sequential): pass

how = sys.argv[1]
torch.set_num_threads(1)
maker = Maker(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256))
judge = Judge(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 1))
one, other = (torch.optim.SGD(net.parameters(), lr=1e-3) for net in (maker, judge))
for n in range(60):
    with torch.no_grad() if how in ("fixed", "detached") else contextlib.nullcontext():
        made = maker(torch.randn(256, 64))
    other.zero_grad(set_to_none=how != "zeros")
    (judge(made).mean() - judge(torch.randn(256, 256)).mean()).backward()
    other.step()
    if n % 4 == 3:
        judge.requires_grad_(how != "fixed")
        one.zero_grad(set_to_none=how != "zeros")
        (-judge(maker(torch.randn(256, 64))).mean()).backward()
        one.step()
        judge.requires_grad_(True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "dropped"),
    [
        ("plain", {"(Maker)": (75, 60), "(Judge)": (75, 15)}),
        pytest.param("fixed", {}, marks=pytest.mark.slow),
        pytest.param("detached", {"(Judge)": (75, 15)}, marks=pytest.mark.slow),
        pytest.param("zeros", {}, marks=pytest.mark.slow),  # set to zero they are not seen to be thrown away
    ],
)
def test_gradients_that_are_thrown_away_are_counted(
    tmp_path: Path, how: str, dropped: dict[str, tuple[int, int]]
) -> None:
    (tmp_path / "train.py").write_text(COMPILES_NOTHING + AGAINST)
    command = wrapped(tmp_path / "run", [sys.executable, tmp_path / "train.py", how])
    assert launch(command, tmp_path).returncode == 0
    told = facts(tmp_path / "run/ranks/00000")["dropped"]
    found = {one["module"]: (one["passes"], one["dropped"]) for one in told if one["module"].startswith("(")}
    assert {one["module"] for one in told if one["through"] and one["module"].startswith("(")} <= {"(Judge)"}
    assert found == {name: pytest.approx(counts, abs=5) for name, counts in dropped.items()}
    rule = ask(unused_gradients.RULE, tmp_path / "run")
    assert rule.state == ("found" if dropped else "clear") or (how == "detached" and rule.share < 0.05)
    if rule.state == "found":
        texts = ["run `Maker` under `torch.no_grad()`", "`requires_grad_(False)` on `Judge` while another network"]
        assert [text for text in texts if any(one.text.startswith(text) for one in rule.changes)] == texts[
            2 - len(dropped) :
        ]
        assert rule.changes[0].text.startswith(texts[2 - len(dropped)])
        assert rule.at_most
        assert rule.share < 0.8


def test_one_loss_for_two_optimizers_drops_nothing() -> None:
    torch = pytest.importorskip("torch", reason="gradients are torch's")
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    refs, seen = [weakref.ref(one) for one in optimizers], Dropped()
    for n in range(12):
        if n % 3 == 0:  # gradients of three passes add up
            for one in optimizers:
                one.zero_grad()
        second(first(torch.ones(2, 4))).sum().backward()
        for one in optimizers if n % 3 == 2 else ():
            seen.see(one, refs)
            one.step()
    assert seen.facts([weakref.ref(first), weakref.ref(second)], refs) == []
