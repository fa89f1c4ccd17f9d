"""Modules and uneven all-to-alls are named in the trace and nowhere else, and nothing else changes."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.analysis.communication.collectives import collectives
from dlprof.analysis.engine import RankData
from dlprof.analysis.modules.frames import module_frames
from dlprof.analysis.modules.work import module_work
from dlprof.read.run import open_run
from dlprof.record.model.ranges import Ranges
from dlprof.record.step_clock import FETCH, Phases
from tests.fixtures.in_process import run_plainly, run_recorded
from tests.fixtures.jobs import as_ranks, facts, launch, record, tiny, wrapped
from tests.fixtures.runs import measured

torch: Any = pytest.importorskip("torch", reason="recording needs torch")


class Net(torch.nn.Module):  # type: ignore[misc]
    """A model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        """Compute."""
        return self.head(self.body(x))


def ranges(warnings: list[str], phases: tuple[int, ...] = ()) -> Ranges:
    clock = Phases(None)  # type: ignore[arg-type]
    clock.phases = list(phases)
    return Ranges(clock, warnings.append)


def names_in(profiler: Any) -> list[str]:
    return [e.name for e in profiler.events() if e.name.startswith("nn.Module")]


def test_a_module_has_its_path_and_its_class() -> None:
    said: list[str] = []
    model, loss, made = Net(), torch.nn.MSELoss(), ranges(said)
    made.start([model])
    # Another module in the place in memory of one that is gone has its own name.
    gone: Any = ranges([])
    linear: Any = torch.nn.Linear(2, 2)
    gone.start([linear])
    address = id(linear)
    del linear
    gc.collect()
    others = [torch.nn.ReLU() for _ in range(2_000)]
    (other, *_) = [one for one in others if id(one) == address] or others
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for module in (model, model.body[0], model.head, loss, torch.nn.MSELoss()):
            made.open(module).__exit__(None, None, None)
        gone.open(other).__exit__(None, None, None)
        assert made.measure() > 0
    assert names_in(profiler) == [
        "nn.Module:  (Net)",
        "nn.Module: body.0 (Linear)",
        "nn.Module: head (Linear)",
        *["nn.Module: (MSELoss) (MSELoss)"] * 2,
        "nn.Module: (ReLU) (ReLU)",
    ]
    assert (made.count, said) == (5, [])
    made.stop()
    assert (made._clock.naming, made._names) == (False, {})
    # A loader's transforms are no part of the model.
    of_loader = ranges([], (FETCH,))
    of_loader.start([])
    assert (of_loader.open(torch.nn.ReLU()), of_loader.count) == (None, 0)


def test_what_cannot_be_named_is_said_once_and_the_job_goes_on() -> None:
    class Odd(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["_modules"] = 5

    said: list[str] = []
    made = ranges(said)
    made.start([Odd()])
    assert not made._clock.naming
    made.start([])
    assert made.open(Odd()) is None
    assert not made._clock.naming
    assert ["AttributeError: 'int' object has" in text for text in said] == [True] * 2


def test_ranges_go_on_where_the_arithmetic_of_a_step_was_counted_meanwhile() -> None:
    made, model = ranges([]), Net()
    innermost = made.follow([model])
    with made.open(model):
        assert innermost() == "nn.Module:  (Net)"
    made.start([model])
    made.follow_no_more()
    assert made._clock.naming
    assert made.open(model) is not None
    made.stop()
    made.follow([model])
    made.follow_no_more()
    assert not made._clock.naming
    assert made._clock.ranges == []


HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8, requires_grad=True), torch.randn(64, 1))
def train(model, optimizer, batch):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss
"""


def calls(folder: Path) -> Counter[tuple[str, str]]:
    """Return how often each module was called in the traced steps, by path and part."""
    frames = RankData(open_run(folder).ranks[0]).once(module_frames)
    parts = ("forward", "recompute")
    return Counter((frames.paths[frames.module[n]], parts[frames.part[n]]) for n in frames.calls.nonzero()[0].tolist())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_job_names_its_modules_in_the_traced_steps_and_tells_what_that_cost(reentrant: bool, tmp_path: Path) -> None:
    body = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 1)
        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant={reentrant}))
    class Odd(nn.Module):
        def forward(self, x):
            raise KeyError("on purpose")
    model, odd, caught = Net(), Odd(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for batch in DataLoader(data, batch_size=4):
            train(model, optimizer, batch)
            try:
                odd(batch[0])
            except KeyError:
                caught += 1
    plain = nn.Sequential(nn.Linear(8, 1))
    left = caught, len(list(torch.fx.symbolic_trace(plain).graph.nodes)), torch.jit.script(plain)(data[0][0]).shape
    """
    folder = tmp_path / "run"
    assert run_recorded(tmp_path, HEAD + dedent(body), window=(5, 1, 3))["left"] == (48, 3, (1,))
    modules = [(path, part) for part in ("forward", "recompute") for path in ("body", "body.0", "body.1")]
    assert calls(folder) == dict.fromkeys([("", "forward"), ("head", "forward"), ("(Odd)", "forward"), *modules], 3)
    told = facts(folder / "ranks/00000")["window"]["modules"]
    assert told["ranges"] == 27
    assert 50 < told["ns_each"] < 1_000_000
    work = measured(folder, module_work).frame(module_work)
    assert set(work.loc[work["part"] == "backward", "path"]) >= {"body.0", "body.1", "head"}
    flops = work.set_index(["path", "part"])["flops"]
    assert flops["body.0", "forward"] == 2 * 4 * 8 * 16  # as the recorder counted them in a step before
    assert flops["body.0", "backward"] == 2 * flops["body.0", "forward"]
    assert flops["head", "forward"] == 2 * 4 * 16


def test_a_compiled_model_is_compiled_as_often_and_computes_the_same(tmp_path: Path) -> None:
    body = """
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    compiled = []
    def backend(graph, inputs):
        compiled.append(len(graph.graph.nodes))
        return graph.forward
    class Broken(nn.Module):  # its graph breaks within the block
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)
        def forward(self, x):
            print(end="")
            return torch.relu(self.inner(x))
    model = nn.Sequential(nn.Linear(8, 16), Broken(), nn.ReLU(), nn.Linear(16, 1))
    model[0].compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = torch.compile(model, backend=backend)
    losses = []
    for epoch in range(3):
        for batch in DataLoader(data, batch_size=4):
            losses.append(train(model, optimizer, batch).item())
    left = compiled, dict(counters["frames"]), sum(counters["graph_break"].values()), losses
    """
    plain = run_plainly(tmp_path, HEAD + dedent(body))["left"]
    assert run_recorded(tmp_path, HEAD + dedent(body), window=(5, 1, 3))["left"] == plain
    assert plain[0]
    assert calls(tmp_path / "run")["", "forward"] >= 3
    work = measured(tmp_path / "run", module_work).frame(module_work)
    assert work.set_index(["path", "part"]).loc[("", "forward"), "compiled"] == 1


ALL_TO_ALL = """
import torch.distributed as dist
from torch.distributed import all_to_all_single
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(12):
    give, take = [[2, 1 + step], [3, 4]][rank], [[2, 3], [1 + step, 4]][rank]
    came = torch.empty(sum(take), 8)
    all_to_all_single(came, torch.randn(sum(give), 8), output_split_sizes=take, input_split_sizes=give)
    even = torch.empty(4)
    work = dist.all_to_all_single(even, torch.full((4,), float(rank)), async_op=True)
    work.wait()
    assert even.tolist() == [0, 0, 1, 1]
    for batch in DataLoader(data, batch_size=32):
        train((came[:1], batch[1][:1]))
        break
dist.destroy_process_group()
"""


@pytest.mark.long
def test_the_trace_of_gloo_tells_what_goes_where_in_an_all_to_all(tmp_path: Path) -> None:
    script = tiny(tmp_path, ALL_TO_ALL)
    done = launch(wrapped(tmp_path / "run", as_ranks(script), "--window", "4,1,3"), tmp_path)
    assert done.returncode == 0, done.stderr
    frame = measured(tmp_path / "run", collectives).frame(collectives)
    for rank, of in frame[frame["collective"] == "all_to_all"].groupby("rank"):
        steps = [int(text.split(">")[0].split(",")[1]) for text in of["pieces"] if text != ">"]
        assert of["pieces"].tolist()[1::2] == [">"] * len(steps)
        if rank == 0:
            assert steps == list(range(steps[0], steps[0] + len(steps)))
            assert len(steps) >= 2
        else:
            assert set(steps) == {4}


@pytest.mark.long
def test_a_compiled_all_to_all_stays_in_one_graph(tmp_path: Path) -> None:
    """Dynamo takes the collective itself, as without us. It must not have met that of another test's recording."""
    body = """
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    @torch.compile(backend="eager", fullgraph=True)
    def exchange(x):
        came = torch.empty_like(x)
        dist.all_to_all_single(came, x * 2)
        return came + 1

    for step in range(12):
        assert exchange(torch.ones(4)).tolist() == [3, 3, 3, 3]
        for batch in DataLoader(data, batch_size=32):
            train(batch)
    dist.destroy_process_group()
    """
    record(tiny(tmp_path, body), folder=tmp_path / "run", options=["--window", "4,1,3"])
