"""What each module takes of a step, in time and FLOPs, compiled or not: on hand-made traces, and of real jobs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RankData
from dlprof.analysis.modules.frames import module_rows
from dlprof.analysis.modules.work import GRAPH, OUTSIDE, apart, host_pieces, module_flops, module_naming, module_work
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_sets, device_work
from dlprof.analysis.timeline.steps import launched_within, timing
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import layers, runs, traces
from tests.fixtures.jobs import record, tiny
from tests.fixtures.places import TRACES
from tests.fixtures.traces import AUTOGRAD, MAIN, Event

OTHER = 4200  # another thread


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
    columns = ("host_ns", "calls")
    assert {(path, part): tuple(row[c] for c in columns) for (path, _, part), row in rows.items()} == {
        ("", "forward"): (50, 1), ("a", "forward"): (200, 1),
        ("b", "forward"): (100, 1), ("b", "backward"): (60, 1),
        ("a", "backward"): (150, 2), (OUTSIDE, "backward"): (10, 1),
        (OUTSIDE, "other"): (430, 1),
    }  # fmt: skip
    exposed = column(rows, "exposed_ns")
    assert sum(exposed.values()) == 1_000
    assert (exposed[OUTSIDE, "other"], exposed["a", "forward"]) == (430 + waits, 200)
    assert all(math.isnan(row["flops"]) and row["device_ns"] == 0 for row in rows.values())


# Events of steps of 1,000 → host time and calls, by path and part.
STEPS: dict[str, tuple[list[Any], dict[tuple[str, str], tuple[float, float]]]] = {
    "a wrapper and what it wraps are called once": (
        [
            *(layers.called("", "Net", 0, 900), layers.called("", "Net", 10, 880)),
            *(layers.called("a", "Linear", at, 100) for at in (20, 200)),
        ],
        {("", "forward"): (700, 1), ("a", "forward"): (200, 2)},
    ),
    "the mean of several steps": (
        [
            *(traces.step(n, 1_000 * n, 1_000) for n in range(4)),
            *(layers.called("", "Net", 1_000 * n, 100 * (n + 1)) for n in range(4)),
        ],
        {("", "forward"): (250, 1), (OUTSIDE, "other"): (750, 0)},
    ),
    "what runs in no step does not count": (
        [traces.step(0, 0, 100), layers.called("", "Net", 50, 100), layers.called("", "Net", 200, 100)],
        {("", "forward"): (50, 1), (OUTSIDE, "other"): (50, 0)},
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_host_time_and_calls(name: str, tmp_path: Path) -> None:
    events, told = STEPS[name]
    rows = work(tmp_path, layers.on_cpu(events))
    calls = column(rows, "calls")
    assert {key: (ns, calls[key]) for key, ns in column(rows, "host_ns").items()} == told


def test_a_step_on_a_device(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, 10_000), layers.called("", "Net", 0, 1_000), layers.called("a", "Linear", 100, 300),
        layers.forward("addmm", 110, 200, 1), traces.call("cudaLaunchKernel", 150, 10, 1),
        traces.call("cudaMemcpyAsync", 700, 10, 2), layers.function("AddmmBackward0", 1_500, 500, 1, AUTOGRAD),
        traces.call("cudaLaunchKernel", 1_600, 10, 3, tid=AUTOGRAD), layers.accumulates(2_100, 500, AUTOGRAD),
        traces.call("cudaLaunchKernelExC", 2_250, 10, 4, tid=AUTOGRAD), traces.call("cudaGraphLaunch", 4_000, 10, 5),
        traces.kernel("forward", 1_000, 2_000, 1),
        traces.copy(2_500, 1_000, 4_096, correlation=2, stream=8),  # half of it beside the kernel
        traces.kernel("backward", 4_000, 1_000, 3),
        traces.collective(4_500, 2_000, 1_000, correlation=4),  # 500 of it beside the kernel
        traces.kernel("replayed", 7_000, 500, 5), traces.kernel("replayed too", 7_500, 500, 5),
    )  # fmt: skip
    rows = work(tmp_path, made)
    on_device = {key: (row["device_ns"], row["exposed_ns"]) for key, row in rows.items() if row["device_ns"]}
    assert on_device == {
        ("a", "Linear", "forward"): (2_000, 2_000),
        ("", "Net", "forward"): (1_000, 500),
        ("a", "Linear", "backward"): (1_000, 1_000),
        ("", "Net", "communication"): (2_000, 1_500),
        (OUTSIDE, GRAPH, "other"): (1_000, 1_000),
    }
    assert sum(row["exposed_ns"] for row in rows.values()) == 6_000
    assert rows["", "Net", "forward"]["copied_bytes"] == 4_096
    assert rows["", "Net", "communication"]["calls"] == 1
    # The host: 1,000 in the model, 1,000 in functions of the backward pass, and the rest of the step.
    assert sum(row["host_ns"] for row in rows.values()) == 10_000


def test_an_exchange_on_a_cpu_costs_where_nothing_is_computed_beside_it(tmp_path: Path) -> None:
    made = layers.on_cpu(
        traces.step(0, 0, 1_000), layers.called("", "Net", 0, 200), layers.forward("addmm", 0, 200, 1),
        layers.function("AddmmBackward0", 300, 100, 1), traces.op("aten::mm", 300, 100), layers.accumulates(400, 50),
        traces.annotation("gloo:all_reduce", 410, 400), layers.function("AddmmBackward0", 500, 100, 1),
        traces.op("aten::mm", 500, 100),
    )  # fmt: skip
    exposed = column(work(tmp_path, made), "exposed_ns")
    assert sum(exposed.values()) == 1_000
    assert exposed["", "communication"] == pytest.approx(300, abs=50)
    assert exposed["", "backward"] == pytest.approx(200, abs=50)


def test_a_trace_without_modules_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="no names of modules"):
        work(tmp_path, traces.training())


# -- the host's time in pieces


def test_pieces_of_a_thread_do_not_overlap_and_calls_outside_of_modules_are_some(tmp_path: Path) -> None:
    made = layers.on_cpu(
        traces.step(0, 0, 1_000), layers.called("", "Net", 100, 300), layers.called("a", "ReLU", 200, 100),
        traces.op("aten::relu", 210, 50), traces.op("aten::mse_loss", 500, 100), traces.op("aten::sub", 520, 50),
        traces.op("c10d::allreduce_", 700, 20),
        traces.annotation("gloo:all_reduce", 700, 250),  # lasts until it is through
        traces.op("aten::mul", 50, 100, OTHER),
    )  # fmt: skip
    pieces = runs.rank_of(tmp_path, made).once(host_pieces)
    begin = traces.BASE_NS
    by_lane = {
        lane: sorted(zip(pieces.start[of] - begin, pieces.end[of] - begin, pieces.module[of], strict=True))
        for lane in set(pieces.lane.tolist())
        for of in [pieces.lane == lane]
    }
    assert sorted(by_lane.values(), key=len) == [
        [(50, 150, -1)],
        [(100, 200, 0), (200, 300, 1), (300, 400, 0), (500, 600, -1), (700, 720, -1)],
    ]


def test_an_operator_around_a_module_has_what_the_module_has_not(tmp_path: Path) -> None:
    made = layers.on_cpu(traces.step(0, 0, 1_000), traces.op("Wrapper", 100, 300), layers.called("", "Net", 200, 100))
    pieces = runs.rank_of(tmp_path, made).once(host_pieces)
    took = (pieces.end - pieces.start).tolist()
    assert sorted(zip(pieces.module.tolist(), took, strict=True)) == [(-1, 100), (-1, 100), (0, 100)]


@pytest.mark.parametrize("size", [0, 1, 25])
def test_intervals_apart_cover_the_same_and_overlap_nowhere(size: int) -> None:
    rng = np.random.default_rng(size)
    start = np.sort(rng.integers(0, 60, size))
    end = start + rng.integers(0, 30, size)
    begin, stop = apart(start, end)
    assert (stop >= begin).all()
    assert (stop - begin).sum() == iv.total(iv.union(start, end))
    np.testing.assert_array_equal(iv.union(begin, stop), iv.union(start, end))


# -- FLOPs, by the shapes in a trace or as the recorder counted

SHAPES = {"Input Dims": [[8, 4], [4, 16]], "Input type": ["float", "float"]}


def test_products_count_to_the_module_that_multiplies(tmp_path: Path) -> None:
    made = layers.on_cpu(
        traces.step(0, 0, 500), layers.called("", "Net", 0, 400), layers.called("a", "Linear", 10, 100),
        layers.forward("matmul", 15, 80, 1), layers.forward("mm", 20, 50, 2, **SHAPES),
        layers.called("b", "Tanh", 200, 50), layers.forward("tanh", 210, 20, 3),
    )  # fmt: skip
    rows = runs.rank_of(tmp_path, made).once(module_work).set_index("path")["flops"]
    assert rows.to_dict() == {"": 0.0, "a": 2 * 8 * 4 * 16, "b": 0.0, "(outside of modules)": 0.0}


def test_a_module_with_a_product_whose_flops_no_shape_shows_has_none(tmp_path: Path) -> None:
    told = {"Input Dims": [[2, 3, 8, 8], [4, 3, 3, 3], [4]], "Input type": ["float"] * 3}
    made = layers.on_cpu(
        traces.step(0, 0, 500),
        layers.called("a", "Conv2d", 10, 100),
        layers.forward("mkldnn_convolution", 20, 50, 1, **told),
        layers.called("b", "Linear", 200, 100),
        layers.forward("mm", 210, 20, 2, **SHAPES),
    )
    rows = runs.rank_of(tmp_path, made).once(module_work).set_index("path")["flops"]
    assert rows.isna().to_dict() == {"a": True, "b": False, "(outside of modules)": False}
    assert rows["b"] == 2 * 8 * 4 * 16


def test_without_shapes_they_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="shapes"):
        runs.rank_of(tmp_path, layers.on_cpu(layers.two_layers())).once(module_flops)


def test_what_the_recorder_counted_is_of_each_step(tmp_path: Path) -> None:
    events = [traces.step(0, 0, 500), traces.step(1, 500, 500), layers.called("", "Net", 0, 400)]
    events += [layers.called("a", "Linear", 10, 100), layers.called("a", "Linear", 510, 100)]
    run = runs.recorded(tmp_path, (layers.on_cpu(events), [], {}))
    row = {"kind": "Linear", "parameters": 1, "parameter_bytes": 4, "bucket": -1, "sharded": 0}
    counted = [
        row | {"path": "a", "forward_flops": 100, "recompute_flops": 0, "backward_flops": 200},
        row | {"path": "a.inner", "forward_flops": 7, "recompute_flops": 0, "backward_flops": 0},  # not in the trace
    ]
    (run / "ranks/00000/modules.jsonl").write_text("".join(json.dumps(one) + "\n" for one in counted))
    frame = runs.measured(run, module_work).frame(module_work)
    flops = frame[frame["flops"] > 0].set_index(["path", "part"])["flops"].to_dict()
    assert flops == {("a", "forward"): 107, ("a", "backward"): 200}


# -- what naming the modules costs


def naming(tmp_path: Path, window: dict[str, Any]) -> Any:
    events = [traces.step(n, 1_000_000 * n, 1_000_000) for n in (12, 13, 14, 15)]
    return runs.measured(runs.recorded(tmp_path, (layers.on_cpu(events), [], {"window": window})), module_naming)


def test_ranges_take_what_the_recorder_measured_for_one(tmp_path: Path) -> None:
    window = {"first_step": 12, "last_step": 15, "modules": {"ranges": 200, "ns_each": 1_200}}
    (row,) = naming(tmp_path, window).frame(module_naming).to_dict("records")
    assert (row["ranges"], row["ns"], row["share"]) == (50, 60_000, pytest.approx(0.06))


@pytest.mark.parametrize("modules", [None, {"ranges": 0, "ns_each": None}])
def test_where_no_module_was_named_there_is_no_cost(tmp_path: Path, modules: Any) -> None:
    found = naming(tmp_path, {"first_step": 12, "last_step": 15, "modules": modules})
    assert "no names of modules" in str(found.lacking(module_naming))


# -- a real trace that others recorded with stacks: the sums are those that an independent program made

REAL = TRACES / "gpu_async/mi300_resnet.json.gz"

NEEDS = pytest.mark.skipif(not REAL.is_file(), reason="the reference traces are not here (../shared/traces)")


@pytest.fixture(scope="module")
def rank() -> RankData:
    return RankData(open_run(REAL).ranks[0])


@NEEDS
def test_all_work_of_the_steps_is_some_modules_or_outside(rank: RankData) -> None:
    work, steps = rank.once(module_work), rank.once(timing)
    mine = rank.once(launched_within) >= 0
    n = len(steps.windows)
    assert work["device_ns"].sum() * n == pytest.approx(rank.once(device_work)["dur_ns"].to_numpy()[mine].sum())
    busy = iv.intersect(rank.once(device_sets).busy, iv.merge(steps.windows))
    assert work["exposed_ns"].sum() * n == pytest.approx(iv.total(busy))


@NEEDS
def test_a_resnets_convolutions_and_norms_have_most_of_its_computing(rank: RankData) -> None:
    work = rank.once(module_work)
    computing = work[work["part"].isin(["forward", "recompute", "backward"])]
    by_kind = computing.groupby("kind")["device_ns"].sum() / 1e6
    # Computation is 6.4 ms a step (GPU.md §1 of the reference), with copies and what is outside of modules 7.1.
    assert by_kind.sum() == pytest.approx(6.7, abs=0.3)
    assert by_kind["Conv2d"] == pytest.approx(3.5, abs=0.3)
    assert by_kind["BatchNorm2d"] == pytest.approx(2.4, abs=0.3)
    assert by_kind.nlargest(2).index.tolist() == ["Conv2d", "BatchNorm2d"]
    exchanged = work[work["part"] == "communication"]
    assert exchanged["device_ns"].sum() / 1e6 == pytest.approx(15.7, abs=0.1)
    assert exchanged["exposed_ns"].sum() / 1e6 == pytest.approx(11.8, abs=0.1)


@NEEDS
def test_its_blocks_are_checkpointed_and_run_again(rank: RankData) -> None:
    work = rank.once(module_work).set_index(["path", "part"])
    again = work[work.index.get_level_values("part") == "recompute"]
    assert len({path for path, _ in again.index}) > 30
    for path in ("Sequential_0.BasicBlock_0.Conv2d_1", "Sequential_5.BasicBlock_7.Conv2d_19"):
        first, second = work.loc[(path, "forward"), "device_ns"], work.loc[(path, "recompute"), "device_ns"]
        assert second == pytest.approx(first, rel=0.15)


@NEEDS
def test_each_kernel_that_a_function_of_the_backward_pass_launched_has_a_module(rank: RankData) -> None:
    rows, spans = rank.once(module_rows), rank.table("spans")
    backward = host.is_kind(spans, "kernel") & (rows["part"] == "backward").to_numpy()
    without = backward & (rows["module"].to_numpy() < 0)
    took = spans["dur_ns"].to_numpy()
    assert took[without].sum() < 0.02 * took[backward].sum()


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
    data = TensorDataset(torch.randn(16 * 20, 64, 128), torch.randn(16 * 20, 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(data, batch_size=16):
        train(batch)
"""


@pytest.mark.long
def test_all_rows_make_up_the_step_and_the_layer_that_was_made_slower_is_the_first(tmp_path: Path) -> None:
    record(tiny(tmp_path, BLOCKS), folder=tmp_path / "run", options=["--window", "5,2,8", "--no-sample"])
    rank = RankData(open_run(tmp_path / "run").ranks[0])
    work, steps = rank.once(module_work), rank.once(timing)
    mean = iv.total(iv.merge(steps.windows)) / len(steps.windows)
    assert work["exposed_ns"].sum() == pytest.approx(mean, rel=1e-6)
    assert work["host_ns"].sum() == pytest.approx(mean, rel=1e-6)
    # Hardly anything of the backward pass is nobody's: the loss, which is a function.
    backward = work[work["part"] == "backward"]
    nobodys = backward.loc[backward["path"].str.startswith("("), "exposed_ns"].sum()
    assert nobodys < 0.05 * backward["exposed_ns"].sum()
    assert {"forward", "backward", "optimizer", "input"} <= set(work["part"])
    block = work["path"].str.split(".").str[0]
    for part in ("forward", "backward"):
        took = work[work["part"] == part].groupby(block)["exposed_ns"].sum().drop("", errors="ignore")
        assert took.idxmax() == "2"
        assert took["2"] == pytest.approx(5 * took[["0", "1", "3", "4"]].mean(), rel=0.3)
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


@pytest.mark.slow
def test_the_backward_pass_of_a_layer_takes_what_it_takes_alone(tmp_path: Path) -> None:
    out = tmp_path / "alone.json"
    options = ["--window", "5,2,8", "--no-sample"]
    record(tiny(tmp_path, ALONE), str(out), folder=tmp_path / "run", options=options)
    work: Any = RankData(open_run(tmp_path / "run").ranks[0]).once(module_work).set_index(["path", "part"])
    # Of the traced steps; each holds the layer's backward pass twice: within the model's, and alone.
    alone = sorted(json.loads(out.read_text())[7:15])
    assert work.loc[("large", "backward"), "exposed_ns"] == pytest.approx(2 * sum(alone) / len(alone), rel=0.15)


# -- compiled graphs divided by module

Call = tuple[str, str, str]  # operator, module, what comes before it

KINDS = {"": "Net", "a": "Linear", "b": "Linear", "h": "ModuleList"} | {f"h.{n}": "Block" for n in range(2)}
KINDS |= {f"h.{n}.up": "Linear" for n in range(2)}


def graph(key: str, start: int, dur: int) -> Event:
    return traces.op(f"## Call CompiledFxGraph {key} ##", start, dur)


def shares(
    folder: Path, events: Sequence[Event | list[Event]], graphs: dict[str, list[Call]], *, gpu: bool = False
) -> dict[tuple[str, str], float]:
    """Return the time of the step by module and part, in a run that noted these graphs."""
    made = traces.trace(*events, world_size=1) if gpu else layers.on_cpu(*events)
    runs.recorded(folder, (made, (), runs.GPU if gpu else runs.CPU))
    rank = folder / "ranks" / "00000"
    tree = [{"path": p, "kind": k, "parameters": 1, "parameter_bytes": 4} for p, k in KINDS.items()]
    rows = [
        {"graph": key, "operator": operator, "module": module, "before": before}
        for key, calls in graphs.items()
        for operator, module, before in calls
    ]
    for name, lines in (("modules", tree), ("compiled", rows)):
        (rank / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    work = RankData(open_run(folder).ranks[0]).once(module_work)
    return {(path, part): ns for path, part, ns in zip(work["path"], work["part"], work["exposed_ns"], strict=True)}


def flags(folder: Path) -> dict[str, list[float]]:
    """Return how often each module is called, whether it is one compiled piece, and whether its kernels are known."""
    work = RankData(open_run(folder).ranks[0]).once(module_work)
    forward = work[work["part"] == "forward"]
    rows = forward[["path", "calls", "compiled", "fused"]].to_dict("split")["data"]
    return {path: said for path, *said in rows}


def whole(*inside: Event) -> list[Event | list[Event]]:
    """Return a step of 1,000 ns in which a model runs from 100 on for 400, compiled, and back from 600 on for 300."""
    return [
        traces.step(0, 0, 1_000),
        layers.called("", "Net", 100, 400),
        traces.op("Torch-Compiled Region: 0/0", 110, 380),
        traces.op("Torch-Compiled Region: 1/0", 112, 5),  # without a graph
        layers.forward("CompiledFunction", 120, 360, 3),
        layers.function("CompiledFunctionBackward", 600, 300, 3),
        *inside,
    ]


FORWARD = [("aten::addmm", "a", "a"), ("aten::addmm", "b", "b"), ("", "b", "b")]
BACKWARD = [("aten::mm", "b", ""), ("aten::mm", "a", "b")]
ONE = [graph("one", 150, 300), traces.op("aten::addmm", 160, 40)]

# What runs within the model, and the calls that were noted of its graphs → time of the step by module and part, and
# of the model: how often it is called, whether it is one compiled piece, and whether its kernels are known.
GRAPHS: dict[str, tuple[list[Event], dict[str, list[Call]], dict[tuple[str, str], float], list[float]]] = {
    "operators and the kernels between them go to their modules": (
        [
            *ONE,  # until 200
            traces.op("aten::addmm", 300, 100), graph("two", 620, 200), traces.op("aten::mm", 650, 50),
            traces.op("aten::mm", 750, 20),
        ],
        {"one": FORWARD, "two": BACKWARD},
        {
            ("", "forward"): 100.0,  # around the graph
            ("a", "forward"): 50.0, ("b", "forward"): 250.0,
            ("", "backward"): 130.0,  # around the graph, and before its first call
            ("b", "backward"): 100.0, ("a", "backward"): 70.0,
            (OUTSIDE, "other"): 300.0,
        },
        [1, 0, 1],  # a graph that is divided is no region
    ),
    "a graph whose calls are not those that were noted is one piece": (
        [*ONE, graph("other", 620, 200)], {"one": FORWARD},
        {("", "forward"): 400.0, ("", "backward"): 300.0, (OUTSIDE, "other"): 300.0}, [1, 1, 0],
    ),
    "a graph of one layer is called by the model": (
        [graph("one", 150, 300), traces.op("aten::addmm", 150, 300)], {"one": [("aten::addmm", "h.1.up", "h.1.up")]},
        {
            ("", "forward"): 100.0, ("h.1.up", "forward"): 300.0,
            ("", "backward"): 300.0, (OUTSIDE, "other"): 300.0,
        },
        [1, 0, 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_a_compiled_model(name: str, tmp_path: Path) -> None:
    events, graphs, told, flagged = GRAPHS[name]
    assert shares(tmp_path, whole(*events), graphs) == told
    assert flags(tmp_path)[""] == flagged


def test_layers_that_share_a_graph_have_their_own_names(tmp_path: Path) -> None:
    events: list[Event | list[Event]] = [traces.step(0, 0, 1_000)]
    for n in range(2):
        at = 400 * n
        events += [
            layers.called(f"h.{n}", "Block", at, 300),
            traces.op("Torch-Compiled Region: 0/0", at + 10, 280),
            graph("one", at + 20, 200),
            traces.op("aten::addmm", at + 20, 150),
        ]
    calls = [("aten::addmm", "h.0.up", "h.0"), ("", "h.0", "h.0")]
    found = shares(tmp_path, events, {"one": calls})
    assert found == {
        **{(f"h.{n}", "forward"): 150.0 for n in range(2)},
        **{(f"h.{n}.up", "forward"): 150.0 for n in range(2)},
        (OUTSIDE, "other"): 400.0,
    }
    assert flags(tmp_path)["h.0"] == [1, 0, 1]
    assert flags(tmp_path)["h.0.up"] == [0, 0, 0]


def test_kernels_on_a_device_go_to_what_launched_them(tmp_path: Path) -> None:
    fused = "triton_poi_fused_gelu_0"
    events = whole(
        graph("one", 150, 300), traces.op("aten::addmm", 160, 40), *traces.launched("gemm", 170, 200, 100, 1),
        traces.op(fused, 210, 20), *traces.launched(fused, 215, 300, 30, 2), traces.op(fused, 240, 20),
        *traces.launched(fused, 245, 330, 70, 3),
    )  # fmt: skip
    calls = [("aten::addmm", "a", "a"), (fused, "", ""), (fused, "b", "b")]
    found = shares(tmp_path, events, {"one": calls}, gpu=True)
    assert {path: found[path, "forward"] for path in ("a", "", "b")} == {"a": 100.0, "": 30.0, "b": 70.0}


@pytest.mark.parametrize("line", ["{", '{"graph": 3}', '{"graph": "x", "operator": "y", "module": "nowhere"}'])
def test_a_log_that_is_cut_or_of_another_model_costs_its_graphs_alone(tmp_path: Path, line: str) -> None:
    events = whole(graph("one", 150, 300), traces.op("aten::addmm", 150, 300))
    runs.recorded(tmp_path, (layers.on_cpu(*events), (), runs.CPU))
    (tmp_path / "ranks" / "00000" / "compiled.jsonl").write_text(f"{line}\n")
    work = RankData(open_run(tmp_path).ranks[0]).once(module_work)
    assert work["exposed_ns"].sum() == 1_000
