"""Gradients that no optimizer uses and dense ones of large embeddings are found in a real job, and in none without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dlprof.analysis.compute.rules import dense_gradient, unused_gradients
from tests.fixtures.asking import ask
from tests.fixtures.jobs import facts, launch, wrapped

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
    (tmp_path / "train.py").write_text(JOB)
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
