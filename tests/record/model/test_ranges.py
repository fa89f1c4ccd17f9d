"""Modules are named in the trace and nowhere else, on whatever thread they run, and nothing else changes."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.modules.frames import module_frames
from dlprof.analysis.modules.work import module_work
from dlprof.read.run import open_run
from dlprof.record.model.ranges import Ranges
from dlprof.record.stepping import FETCH, Phases
from tests.fixtures import runs
from tests.fixtures.jobs import facts, launch, record, tiny

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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for module in (model, model.body[0], model.head, loss, torch.nn.MSELoss()):
            made.open(module).__exit__(None, None, None)
        assert made.measure() > 0
    assert names_in(profiler) == [
        "nn.Module:  (Net)",
        "nn.Module: body.0 (Linear)",
        "nn.Module: head (Linear)",
        *["nn.Module: (MSELoss) (MSELoss)"] * 2,
    ]
    assert made.count == 5
    assert said == []


def test_a_module_that_takes_another_ones_place_in_memory_has_its_own_name() -> None:
    made = ranges([])
    model: Any = torch.nn.Linear(2, 2)
    made.start([model])
    address = id(model)
    del model
    gc.collect()
    others = [torch.nn.ReLU() for _ in range(2_000)]
    taken = [one for one in others if id(one) == address]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for one in taken or others[:1]:
            made.open(one).__exit__(None, None, None)
    assert set(names_in(profiler)) == {"nn.Module: (ReLU) (ReLU)"}


def test_a_loaders_transforms_are_no_part_of_the_model() -> None:
    made = ranges([], (FETCH,))
    made.start([])
    assert made.open(torch.nn.ReLU()) is None
    assert made.count == 0


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
    assert len(said) == 2
    assert all("AttributeError: 'int' object has" in text for text in said)


def test_nothing_is_known_of_a_model_once_the_window_has_closed() -> None:
    made, model = ranges([]), Net()
    made.start([model])
    made.stop()
    assert (made._clock.naming, made._names) == (False, {})


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


def read(folder: Path, rank: int = 0) -> RankData:
    return RankData(open_run(folder).ranks[rank])


def calls(folder: Path, rank: int = 0) -> Counter[tuple[str, str]]:
    """Return how often each module was called in the traced steps, by path and part."""
    frames = read(folder, rank).once(module_frames)
    chosen = frames.calls.nonzero()[0]
    parts = ("forward", "recompute")
    return Counter((frames.paths[frames.module[n]], parts[frames.part[n]]) for n in chosen.tolist())


@pytest.mark.long
def test_a_job_names_its_modules_in_the_traced_steps_and_tells_what_that_cost(tmp_path: Path) -> None:
    loop = tiny(
        tmp_path,
        """
        from torch.utils.checkpoint import checkpoint
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 1)
            def forward(self, x):
                return self.head(checkpoint(self.body, x, use_reentrant="reentrant" in sys.argv))
        model = Net()
        data = TensorDataset(torch.randn(64, 8, requires_grad=True), torch.randn(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            for batch in DataLoader(data, batch_size=4):
                train(batch)
        """,
    )
    for kind in ("plain", "reentrant"):
        folder = tmp_path / kind
        record(loop, kind, folder=folder, options=["--window", "5,1,3"])
        assert calls(folder) == {
            ("", "forward"): 3,
            ("body", "forward"): 3,
            ("body.0", "forward"): 3,
            ("body.1", "forward"): 3,
            ("head", "forward"): 3,
            ("body", "recompute"): 3,
            ("body.0", "recompute"): 3,
            ("body.1", "recompute"): 3,
        }
        told = facts(folder / "ranks/00000")["window"]["modules"]
        assert told["ranges"] == 24
        assert 50 < told["ns_each"] < 200_000
        work = runs.measured(folder, module_work).frame(module_work)
        assert set(work.loc[work["part"] == "backward", "path"]) >= {"body.0", "body.1", "head"}
        flops = work.set_index(["path", "part"])["flops"]
        assert flops["body.0", "forward"] == 2 * 4 * 8 * 16  # as the recorder counted them in a step before
        assert flops["body.0", "backward"] == 2 * flops["body.0", "forward"]
        assert flops["head", "forward"] == 2 * 4 * 16


@pytest.mark.long
def test_a_compiled_model_is_compiled_as_often_and_computes_the_same(tmp_path: Path) -> None:
    loop = tiny(
        tmp_path,
        """
        from torch._dynamo.utils import counters
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
                losses.append(train(batch).item())
        print(compiled, dict(counters["frames"]), sum(counters["graph_break"].values()), losses)
        """,
    )
    plain = launch([sys.executable, loop], tmp_path)
    done = record(loop, folder=tmp_path / "run", options=["--window", "5,1,3"])
    assert done.stdout == plain.stdout
    assert plain.stdout.startswith("[")
    assert calls(tmp_path / "run")["", "forward"] >= 3
    work = runs.measured(tmp_path / "run", module_work).frame(module_work)
    assert work.set_index(["path", "part"]).loc[("", "forward"), "compiled"] == 1


@pytest.mark.long
def test_exceptions_pass_and_the_modules_of_other_threads_are_named(tmp_path: Path) -> None:
    loop = tiny(
        tmp_path,
        """
        class Odd(nn.Module):
            def forward(self, x):
                raise KeyError("on purpose")
        odd, caught = Odd(), 0
        for epoch in range(3):
            for batch in DataLoader(data, batch_size=4):
                train(batch)
                try:
                    odd(batch[0])
                except KeyError as e:
                    caught += 1
        traced = torch.fx.symbolic_trace(model)
        scripted = torch.jit.script(model)
        print(caught, len(list(traced.graph.nodes)), scripted(data[0][0]).shape)
        """,
    )
    plain = launch([sys.executable, loop], tmp_path)
    done = record(loop, folder=tmp_path / "run", options=["--window", "5,1,3"])
    assert done.stdout == plain.stdout
    assert plain.stdout.startswith("48 ")
    assert calls(tmp_path / "run")["(Odd)", "forward"] == 3
