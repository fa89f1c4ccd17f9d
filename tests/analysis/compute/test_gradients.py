"""Gradients that no optimizer uses and dense ones of large embeddings are found in a real job, and in none without."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import pytest

from dlprof.analysis.compute.rules import dense_gradient, unused_gradients
from dlprof.record.model.parameters import Dropped
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
        assert unused.at_most
        assert unused.saving_ns > 0
        assert "`Sequential`" in unused.changes[0].text
        # SGD trains the same with sparse gradients: no change of the training.
        assert ("sparse=True" in dense.changes[0].text, dense.training) == (True, False)
        assert 0.2 < dense.share < 0.95


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
