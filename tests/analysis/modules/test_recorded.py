"""Modules of real jobs on a CPU: what is planted is found, and a layer takes what it takes by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RankData
from dlprof.analysis.modules.work import module_work
from dlprof.analysis.timeline.steps import timing
from dlprof.read.run import open_run
from tests.fixtures import runs
from tests.fixtures.jobs import record, tiny

pytest.importorskip("torch", reason="recording needs torch")
pytestmark = pytest.mark.long

assert runs.MEASURES  # all are known to the engine

BLOCKS = """
    class Block(nn.Module):
        def __init__(self, width, times):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.times = times
        def forward(self, x):
            for _ in range(self.times):
                x = x + self.down(torch.relu(self.up(self.norm(x))))
            return x
    model = nn.Sequential(*(Block(128, 5 if n == 2 else 1) for n in range(5)), nn.Linear(128, 10))
    data = TensorDataset(torch.randn(32 * 20, 64, 128), torch.randn(32 * 20, 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(data, batch_size=32):
        train(batch)
"""

RESNET = """
    class Residual(nn.Module):
        def __init__(self, ins, outs):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(ins, outs, 3, padding=1, bias=False), nn.BatchNorm2d(outs)
            self.conv2, self.bn2 = nn.Conv2d(outs, outs, 3, padding=1, bias=False), nn.BatchNorm2d(outs)
            self.short = nn.Conv2d(ins, outs, 1) if ins != outs else nn.Identity()
            self.relu = nn.ReLU(inplace=True)
        def forward(self, x):
            out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            return self.relu(out + self.short(x))
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 3, padding=1)
            self.layer1, self.layer2, self.fc = Residual(16, 16), Residual(16, 32), nn.Linear(32, 10)
        def forward(self, x):
            return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))
    model = Net()
    data = TensorDataset(torch.randn(8 * 20, 3, 32, 32), torch.randn(8 * 20, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(data, batch_size=8):
        train(batch)
"""


def rank_of(folder: Path, script: str) -> RankData:
    record(tiny(folder, script), folder=folder / "run", options=["--window", "5,2,8", "--no-sample"])
    return RankData(open_run(folder / "run").ranks[0])


@pytest.mark.parametrize("script", [BLOCKS, RESNET])
def test_all_rows_make_up_the_step(tmp_path: Path, script: str) -> None:
    rank = rank_of(tmp_path, script)
    work, steps = rank.once(module_work), rank.once(timing)
    mean = iv.total(iv.merge(steps.windows)) / len(steps.windows)
    assert work["exposed_ns"].sum() == pytest.approx(mean, rel=1e-6)
    assert work["host_ns"].sum() == pytest.approx(mean, rel=1e-6)
    # Hardly anything of the backward pass is nobody's: the loss, which is a function.
    backward = work[work["part"] == "backward"]
    nobodys = backward.loc[backward["path"].str.startswith("("), "exposed_ns"].sum()
    assert nobodys < 0.05 * backward["exposed_ns"].sum()
    assert {"forward", "backward", "optimizer", "input"} <= set(work["part"])


def test_the_layer_that_was_made_slower_is_the_first(tmp_path: Path) -> None:
    work = rank_of(tmp_path, BLOCKS).once(module_work)
    block = work["path"].str.split(".").str[0]
    for part in ("forward", "backward"):
        took = work[work["part"] == part].groupby(block)["exposed_ns"].sum().drop("", errors="ignore")
        assert took.idxmax() == "2"
        others = took[["0", "1", "3", "4"]]
        assert took["2"] == pytest.approx(5 * others.mean(), rel=0.3)
    assert work.set_index(["path", "part"]).loc[("2.up", "forward"), "calls"] == 5


ALONE = """
    import json
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Linear(64, 1024), nn.Linear(1024, 1024)
        def forward(self, x):
            return self.large(torch.tanh(self.small(x)))
    model = Net()
    data = TensorDataset(torch.randn(512 * 20, 64), torch.randn(512 * 20, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    alone = []
    for batch in DataLoader(data, batch_size=512):
        train(batch)
        x = torch.tanh(model.small(batch[0])).detach().requires_grad_()
        out = model.large(x)
        gradient = torch.randn_like(out)
        began = time.perf_counter_ns()
        torch.autograd.backward(out, gradient)
        alone.append(time.perf_counter_ns() - began)
    json.dump(alone, open(sys.argv[1], "w"))
"""


def test_the_backward_pass_of_a_layer_takes_what_it_takes_alone(tmp_path: Path) -> None:
    out = tmp_path / "alone.json"
    options = ["--window", "5,2,8", "--no-sample"]
    record(tiny(tmp_path, ALONE), str(out), folder=tmp_path / "run", options=options)
    work: Any = RankData(open_run(tmp_path / "run").ranks[0]).once(module_work).set_index(["path", "part"])
    # Of the traced steps; each holds the layer's backward pass twice: within the model's, and alone.
    alone = sorted(json.loads(out.read_text())[7:15])
    assert work.loc[("large", "backward"), "exposed_ns"] == pytest.approx(2 * sum(alone) / len(alone), rel=0.15)
