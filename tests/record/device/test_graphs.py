"""Steps of jobs that replay CUDA graphs, with captures and replays that tell the recorder what a GPU's would."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.collectors.steps import Steps
from dlprof.record.device.graphs import Graphs
from dlprof.record.recorder import Recorder
from tests.fixtures.devices import Devices, Model, Parameter
from tests.fixtures.jobs import facts, launch, record, rows

torch = pytest.importorskip("torch", reason="recording needs torch")

MS = 1_000_000


class Graph:
    """Stands for torch.cuda.CUDAGraph."""


class Job:
    """A script's calls, as the hooks pass them on."""

    def __init__(self, folder: Path) -> None:
        self.recorder = Recorder(folder, [Steps])
        self.graphs = Graphs(self.recorder)
        self.model = Model(Parameter(4, "cpu"))
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        self.iterator = SimpleNamespace(_dlprof_pass=None)

    def fetch(self) -> None:
        assert self.recorder.clock.begin_fetch(self.iterator, first=False)
        self.recorder.clock.end_fetch(self.iterator, None)

    def forward(self, inside: Callable[[], object] = lambda: None) -> None:
        assert self.recorder.clock.begin_forward(self.model)
        inside()
        self.recorder.clock.end()

    def backward(self) -> None:
        assert self.recorder.clock.begin_backward()
        self.recorder.clock.end()

    def update(self) -> None:
        self.recorder.clock.begin_optimizer(self.optimizer)
        self.recorder.clock.end_optimizer()

    def train(self) -> None:
        self.forward()
        self.backward()
        self.update()

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = Graph()
        self.graphs.begin_capture(graph)
        work()
        self.graphs.end_capture(graph)
        return graph

    def replay(self, graph: Graph) -> None:
        if self.graphs.begin_replay():
            self.graphs.end_replay(graph)

    def steps(self) -> list[dict[str, Any]]:
        self.recorder.stop("exit")
        assert self.recorder.warnings == []
        return rows(self.recorder.folder)


def told(steps: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(step["kind"], step["backwards"], step["optimizer_steps"]) for step in steps]


def test_a_replayed_training_step_is_a_step_and_its_capture_is_none(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for _ in range(3):
        job.train()
    graph = job.capture(job.train)
    for _ in range(5):
        job.replay(graph)
    assert told(job.steps()) == [("train", 1, 1)] * 8
    assert (job.recorder.clock.mark, job.recorder.observed.graphs) == ("optimizer", 1)


def test_a_job_that_captures_before_it_has_trained_begins_with_the_first_replay(tmp_path: Path) -> None:
    job = Job(tmp_path)
    graph = job.capture(job.train)
    assert not job.recorder.clock.started
    for _ in range(4):
        job.replay(graph)
    assert told(job.steps()) == [("train", 1, 1)] * 4


def test_a_loader_marks_the_steps_that_replay_and_their_kind_is_the_graphs(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.fetch()
    job.train()
    whole, forward = job.capture(job.train), job.capture(job.forward)
    for _ in range(3):
        job.fetch()
        job.replay(whole)
    for _ in range(2):
        job.fetch()
        job.replay(forward)
    assert told(job.steps()) == [("train", 1, 1)] * 4 + [("validation", 0, 0)] * 2
    assert job.recorder.clock.mark == "loader"


def test_forward_and_backward_in_one_graph_and_an_optimizer_beside_it_are_one_step(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def both() -> None:
        job.forward()
        job.backward()

    job.train()
    graph = job.capture(both)
    for _ in range(4):
        job.replay(graph)
        job.replay(graph)  # gradients accumulate
        job.update()
    assert told(job.steps()) == [("train", 1, 1)] + [("train", 2, 1)] * 4


def test_a_graph_of_several_optimizer_steps_is_one_step(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def adversaries() -> None:
        job.train()
        job.train()

    graph = job.capture(adversaries)
    for _ in range(3):
        job.replay(graph)
    assert told(job.steps()) == [("train", 2, 2)] * 3


def test_where_nothing_else_marks_the_replays_do(tmp_path: Path) -> None:
    """The script computes the new weights itself, in the graph."""
    job = Job(tmp_path)
    job.backward()
    graph = job.capture(job.backward)
    for _ in range(40):
        job.replay(graph)
    assert told(job.steps()) == [("train", 33, 0)] + [("train", 1, 0)] * 8
    assert job.recorder.clock.mark == "replay"


def test_a_replay_within_a_modules_call_changes_nothing(tmp_path: Path) -> None:
    """As those of make_graphed_callables and torch.compile(mode="reduce-overhead") are."""
    plain, graphed = Job(tmp_path / "plain"), Job(tmp_path / "graphed")
    graph = graphed.capture(graphed.forward)
    for _ in range(3):
        plain.train()
        graphed.forward(lambda: graphed.replay(graph))
        graphed.backward()
        graphed.update()
    assert told(plain.steps()) == told(graphed.steps())
    assert not graphed.recorder.clock.capturing


def test_what_is_captured_within_a_modules_call_is_that_call_and_no_step(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train()
    job.forward(lambda: job.capture(lambda: None))
    job.backward()
    job.update()
    steps = job.steps()
    assert told(steps) == [("train", 1, 1)] * 2
    assert all(step["forward_ns"] > 0 for step in steps)


def test_a_capture_that_is_given_up_is_not_waited_for(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train()
    graph = Graph()
    job.graphs.begin_capture(graph)
    job.forward()
    del graph
    job.train()
    job.graphs.end_capture(Graph())  # of one that never began
    job.train()
    assert told(job.steps()) == [("train", 1, 1)] * 3
    assert job.recorder.device.captures == 0


def test_a_replayed_step_lasts_from_the_end_of_the_one_before_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(monkeypatch)
    devices.launch(0)
    job = Job(tmp_path)
    job.train()

    def work() -> None:
        devices.capturing = True
        job.train()
        devices.capturing = False

    graph = job.capture(work)
    for _ in range(3):
        devices.launch(2 * MS)
        assert job.graphs.begin_replay()
        devices.launch(9 * MS)
        job.graphs.end_replay(graph)
        devices.now_ns = devices.queued_ns[0]
    assert [step["device_step_ns"] for step in job.steps()][1:] == [11 * MS] * 3


# A build of PyTorch without CUDA has the class, and no graphs: this gives it what the driver would, but for the work.
STAND_IN = """
    import torch

    base = torch.cuda.CUDAGraph.__mro__[1]
    base.__new__ = staticmethod(lambda cls, *args: object.__new__(cls))
    base.__init__ = lambda self, *args: None
    for name in ("capture_begin", "capture_end", "replay"):
        setattr(base, name, lambda self, **kwargs: None)
"""

WHOLE = """
    from torch import nn

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    for _ in range(3):
        train()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    train()
    graph.capture_end()
    for _ in range(20):
        graph.replay()
    print(sorted(vars(graph)))
"""


@pytest.mark.long
@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="this PyTorch has graphs")
def test_pytorchs_own_class_is_watched_and_its_objects_have_nothing_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(dedent(STAND_IN) + dedent(WHOLE))
    done = record(path, folder=tmp_path / "run", options=["--window", "8,1,2"])
    rank = tmp_path / "run/ranks/00000"
    assert told(rows(rank)) == [("train", 1, 1)] * 23
    said = facts(rank)
    assert (said["warnings"], said["graphs"]) == ([], 1)
    assert [said["window"][key] for key in ("state", "first_step", "last_step")] == ["exported", 9, 10]
    assert done.stdout in ("['_tracker']\n", "[]\n")


REAL = """
    import sys, torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 64, device="cuda")
    losses = []

    def train():
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train()
    for _ in range(50):
        graph.replay()
        losses.append(loss.clone())
    print([each.item() for each in losses])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_graphs_steps_are_counted_and_its_losses_are_those_without_dlprof(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(dedent(REAL))
    plain = launch([sys.executable, path], tmp_path)
    done = record(path, folder=tmp_path / "run")
    assert json.loads(done.stdout) == json.loads(plain.stdout)
    rank = tmp_path / "run/ranks/00000"
    assert told(rows(rank)) == [("train", 1, 1)] * 53
    assert facts(rank)["warnings"] == []


WITHIN = """
    import sys, torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    x = torch.randn(32, 64, device="cuda")
    if sys.argv[1] == "callables":
        called = torch.cuda.make_graphed_callables(model, (x.clone(),))
    else:
        called = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        optimizer.zero_grad(set_to_none=False)
        loss = called(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(losses)
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", ["callables", "compiled"])
def test_real_graphs_within_a_models_call_leave_its_steps_and_losses_as_they_are(how: str, tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(dedent(WITHIN))
    plain = launch([sys.executable, path, how], tmp_path)
    done = record(path, how, folder=tmp_path / "run")
    assert json.loads(done.stdout) == pytest.approx(json.loads(plain.stdout), rel=1e-4)
    rank = tmp_path / "run/ranks/00000"
    assert [(step["kind"], step["optimizer_steps"]) for step in rows(rank)] == [("train", 1)] * 40
    assert facts(rank)["warnings"] == []
