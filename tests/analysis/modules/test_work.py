"""What each module takes of a step, on hand-made traces and of real jobs on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RankData
from dlprof.analysis.modules.sums import GRAPH, OUTSIDE
from dlprof.analysis.modules.work import module_work
from dlprof.analysis.timeline.steps import timing
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import layers, runs, traces
from tests.fixtures.jobs import record, tiny
from tests.fixtures.traces import AUTOGRAD, MAIN


def work(tmp_path: Path, made: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, float]]:
    """Return the rows by path, class and part."""
    rows: list[dict[Any, Any]] = runs.rank_of(tmp_path, made).once(module_work).to_dict("records")
    return {(row.pop("path"), row.pop("kind"), row.pop("part")): row for row in rows}


def column(rows: dict[tuple[str, str, str], dict[str, float]], name: str) -> dict[tuple[str, str], float]:
    return {(path, part): row[name] for (path, _, part), row in rows.items()}


@pytest.mark.parametrize("tid", [MAIN, AUTOGRAD])
def test_a_step_on_a_cpu(tmp_path: Path, tid: int) -> None:
    rows = work(tmp_path, layers.on_cpu(layers.two_layers(tid)))
    waits = 0 if tid == MAIN else 220  # the training thread, for the other one
    assert column(rows, "host_ns") == {
        ("", "forward"): 50,
        ("a", "forward"): 200,
        ("b", "forward"): 100,
        ("b", "backward"): 60,
        ("a", "backward"): 150,
        (OUTSIDE, "backward"): 10,
        (OUTSIDE, "other"): 430,
    }
    exposed = column(rows, "exposed_ns")
    assert sum(exposed.values()) == 1_000
    assert exposed[OUTSIDE, "other"] == 430 + waits
    assert exposed["a", "forward"] == 200
    assert column(rows, "calls") == {
        ("", "forward"): 1,
        ("a", "forward"): 1,
        ("b", "forward"): 1,
        ("b", "backward"): 1,
        ("a", "backward"): 2,
        (OUTSIDE, "backward"): 1,
        (OUTSIDE, "other"): 1,
    }
    assert all(math.isnan(row["flops"]) and row["device_ns"] == 0 for row in rows.values())


def test_a_wrapper_and_what_it_wraps_are_called_once(tmp_path: Path) -> None:
    net = [layers.called("", "Net", 0, 900), layers.called("", "Net", 10, 880)]
    again = [layers.called("a", "Linear", at, 100) for at in (20, 200)]
    rows = work(tmp_path, layers.on_cpu([*net, *again]))
    assert column(rows, "calls") == {("", "forward"): 1, ("a", "forward"): 2}
    assert column(rows, "host_ns")["", "forward"] == 700


def test_the_mean_of_several_steps(tmp_path: Path) -> None:
    events = [traces.step(n, 1_000 * n, 1_000) for n in range(4)]
    events += [layers.called("", "Net", 1_000 * n, 100 * (n + 1)) for n in range(4)]
    rows = work(tmp_path, layers.on_cpu(events))
    assert column(rows, "host_ns") == {("", "forward"): 250, (OUTSIDE, "other"): 750}
    assert column(rows, "calls") == {("", "forward"): 1, (OUTSIDE, "other"): 0}


def test_a_step_on_a_device(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, 10_000),
        layers.called("", "Net", 0, 1_000),
        layers.called("a", "Linear", 100, 300),
        layers.forward("addmm", 110, 200, 1),
        traces.call("cudaLaunchKernel", 150, 10, 1),
        traces.call("cudaMemcpyAsync", 700, 10, 2),
        layers.function("AddmmBackward0", 1_500, 500, 1, AUTOGRAD),
        traces.call("cudaLaunchKernel", 1_600, 10, 3, tid=AUTOGRAD),
        layers.accumulates(2_100, 500, AUTOGRAD),
        traces.call("cudaLaunchKernelExC", 2_250, 10, 4, tid=AUTOGRAD),
        traces.call("cudaGraphLaunch", 4_000, 10, 5),
        traces.kernel("forward", 1_000, 2_000, 1),
        traces.copy(2_500, 1_000, 4_096, correlation=2, stream=8),  # half of it beside the kernel
        traces.kernel("backward", 4_000, 1_000, 3),
        traces.collective(4_500, 2_000, 1_000, correlation=4),  # 500 of it beside the kernel
        traces.kernel("replayed", 7_000, 500, 5),
        traces.kernel("replayed too", 7_500, 500, 5),
    )
    rows = work(tmp_path, made)
    assert {key: row["device_ns"] for key, row in rows.items() if row["device_ns"]} == {
        ("a", "Linear", "forward"): 2_000,
        ("", "Net", "forward"): 1_000,
        ("a", "Linear", "backward"): 1_000,
        ("", "Net", "communication"): 2_000,
        (OUTSIDE, GRAPH, "other"): 1_000,
    }
    assert {key: row["exposed_ns"] for key, row in rows.items() if row["exposed_ns"]} == {
        ("a", "Linear", "forward"): 2_000,
        ("", "Net", "forward"): 500,
        ("a", "Linear", "backward"): 1_000,
        ("", "Net", "communication"): 1_500,
        (OUTSIDE, GRAPH, "other"): 1_000,
    }
    assert rows["", "Net", "forward"]["copied_bytes"] == 4_096
    assert rows["", "Net", "communication"]["calls"] == 1
    # The host: 1,000 in the model, 1,000 in functions of the backward pass, and the rest of the step.
    assert sum(row["host_ns"] for row in rows.values()) == 10_000


def test_an_exchange_on_a_cpu_costs_where_nothing_is_computed_beside_it(tmp_path: Path) -> None:
    made = layers.on_cpu(
        traces.step(0, 0, 1_000),
        layers.called("", "Net", 0, 200),
        layers.forward("addmm", 0, 200, 1),
        layers.function("AddmmBackward0", 300, 100, 1),
        traces.op("aten::mm", 300, 100),
        layers.accumulates(400, 50),
        traces.annotation("gloo:all_reduce", 410, 400),
        layers.function("AddmmBackward0", 500, 100, 1),
        traces.op("aten::mm", 500, 100),
    )
    exposed = column(work(tmp_path, made), "exposed_ns")
    assert sum(exposed.values()) == 1_000
    assert exposed["", "communication"] == pytest.approx(300, abs=50)
    assert exposed["", "backward"] == pytest.approx(200, abs=50)


def test_what_runs_in_no_step_does_not_count(tmp_path: Path) -> None:
    made = layers.on_cpu(traces.step(0, 0, 100), layers.called("", "Net", 50, 100), layers.called("", "Net", 200, 100))
    rows = work(tmp_path, made)
    assert column(rows, "host_ns") == {("", "forward"): 50, (OUTSIDE, "other"): 50}


def test_a_compiled_module_is_one_region(tmp_path: Path) -> None:
    made = layers.on_cpu(
        traces.step(0, 0, 1_000),
        layers.called("", "Net", 0, 400),
        layers.called("a", "Block", 100, 200),
        traces.op("Torch-Compiled Region: 0/0", 110, 180),
        layers.forward("CompiledFunction", 120, 160, 3),
        traces.op("graph_0_cpp_fused_addmm_0", 130, 100),
        layers.function("CompiledFunctionBackward", 500, 100, 3),
    )
    rows = work(tmp_path, made)
    assert column(rows, "compiled") == {
        ("", "forward"): 0,
        ("a", "forward"): 1,
        ("a", "backward"): 1,
        (OUTSIDE, "other"): 0,
    }
    assert column(rows, "host_ns")["a", "backward"] == 100


def test_a_trace_without_modules_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="no names of modules"):
        work(tmp_path, traces.training())


# Real jobs on a CPU.

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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_the_backward_pass_of_a_layer_takes_what_it_takes_alone(tmp_path: Path) -> None:
    out = tmp_path / "alone.json"
    options = ["--window", "5,2,8", "--no-sample"]
    record(tiny(tmp_path, ALONE), str(out), folder=tmp_path / "run", options=options)
    work: Any = RankData(open_run(tmp_path / "run").ranks[0]).once(module_work).set_index(["path", "part"])
    # Of the traced steps; each holds the layer's backward pass twice: within the model's, and alone.
    alone = sorted(json.loads(out.read_text())[7:15])
    assert work.loc[("large", "backward"), "exposed_ns"] == pytest.approx(2 * sum(alone) / len(alone), rel=0.15)
