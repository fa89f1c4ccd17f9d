"""Which GPU is a rank's, how long its steps take on a GPU that the host runs ahead of, and steps that replay graphs.

Devices, captures and replays are simulated; the tests marked `gpu` need a real one.
"""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.collectors.facts import _device
from dlprof.record.collectors.steps import Steps
from dlprof.record.device.gpu import Events, Graphs, RankDevice
from dlprof.record.recorder import Recorder
from tests.fixtures.devices import Devices, Model, Parameter
from tests.fixtures.jobs import COMPILES_NOTHING, facts, launch, record, rows

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

MS = 1_000_000
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Broken:
    """A script's own module that fails when it is asked; torch has its parameters all the same."""

    def __init__(self) -> None:
        self._parameters = {"weight": Parameter(10, "cuda", 1)}

    def parameters(self, recurse: bool = True) -> Any:  # noqa: ARG002 - as torch has it
        raise RuntimeError("not materialised")


class Optimizer:
    """An optimizer, as far as it is asked what it steps."""

    def __init__(self, *parameters: Parameter) -> None:
        self.param_groups = [{"params": [*parameters]}]


SPREAD = Model(Parameter(5, "cuda", 0), Parameter(30, "cuda", 2), Parameter(900, "cpu"), Parameter(30, "cuda", 0))


@pytest.mark.parametrize(
    ("models", "optimizers", "index", "other"),
    [
        ([SPREAD], [], 0, None),
        ([SPREAD, Model(Parameter(70, "cuda", 3))], [], 3, None),
        ([Model(Parameter(4, "cuda", 1), Parameter(4, "cuda", 0))], [], 0, None),
        ([Model(Parameter(9, "cpu"), Parameter(9, "meta"))], [], None, None),
        ([torch.nn.Linear(2, 2)], [], None, None),
        ([Broken()], [], 1, None),
        ([], [Optimizer(Parameter(3, "cuda", 1))], 1, None),
        # What an optimizer steps may have been moved to the host: modules come first.
        ([Model(Parameter(1, "cuda", 2))], [Optimizer(Parameter(3, "cuda", 1))], 2, None),
        ([Model(Parameter(9, "cpu"), Parameter(9, "xpu", 0))], [], None, "xpu"),
        ([Model(Parameter(9, "hpu", 0))], [], None, "hpu"),
    ],
)
def test_the_device_is_where_most_parameters_are(
    models: Any, optimizers: Any, index: int | None, other: str | None
) -> None:
    device = RankDevice()
    device.look([weakref.ref(m) for m in models], [weakref.ref(o) for o in optimizers])
    assert (device.index, device.other) == (index, other)
    if index is None:
        recorder: Any = SimpleNamespace(device=device)
        described = _device(recorder)
        assert (described["type"], bool(described["name"]), described["index"]) == (other or "cpu", True, None)


def test_a_model_that_comes_later_is_looked_at_and_one_that_was_seen_is_not_again() -> None:
    asked = []

    class Noting(Model):
        def parameters(self, recurse: bool = True) -> Any:  # noqa: ARG002
            asked.append(self)
            return super().parameters()

    first, second = Noting(Parameter(1, "cpu")), Noting(Parameter(1, "cuda", 1))
    models: list[Any] = [weakref.ref(first)]
    device = RankDevice()
    device.look(models, [])
    device.look(models, [])
    assert (device.index, asked) == (None, [first])
    models.append(weakref.ref(second))
    device.look(models, [])
    assert device.index == 1


def test_the_current_device_counts_where_no_parameters_are_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RankDevice().in_use() is None  # CUDA sleeps, and nobody may wake it
    devices = Devices(monkeypatch)
    devices.current = 1
    device = RankDevice()
    assert device.in_use() is None  # nobody has used it yet
    devices.launch(1, device=1)
    assert device.in_use() == 1
    device.index = 0
    assert device.in_use() == 0


def test_events_are_recorded_on_their_device_never_in_a_graph_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)
    devices.launch(7_000, device=1)
    events = Events(1)
    first = events.record()
    assert (devices.awake, devices.current) == ({1}, 0)
    assert not first.query()
    devices.now_ns = 7_000
    assert first.query()
    devices.capturing = True
    assert events.record() is None
    devices.capturing = False
    second = events.record()
    assert second is not first
    events.release(first)
    assert events.record() is first


class Job:
    """A script's calls, as the hooks pass them on, on a host or a simulated device."""

    def __init__(self, folder: Path, devices: Devices | None = None) -> None:
        self.recorder = Recorder(folder, [Steps])
        self.graphs = Graphs(self.recorder)
        self.devices, self.device = devices, 0
        self.model = Model(Parameter(4, "cpu" if devices is None else "cuda", 0))
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

    def update(self, inside: Callable[[], object] = lambda: None) -> None:
        self.recorder.clock.begin_optimizer(self.optimizer)
        inside()
        self.recorder.clock.end_optimizer()

    def train(self) -> None:
        self.forward()
        self.backward()
        self.update()

    def step(self, device_ns: int, before_ns: int = 0, during: Callable[[], object] = lambda: None) -> None:
        """Launch some work before the first forward pass, and the rest in it."""
        assert self.devices is not None
        if before_ns:
            self.devices.launch(before_ns, self.device)
        self.forward(lambda: self.devices.launch(device_ns, self.device) if self.devices else None)
        self.backward()
        self.update(during)
        if not self.devices.capturing:
            self.recorder.pass_on()

    def capture(self, work: Callable[[], object]) -> Any:
        graph = type("Graph", (), {})()  # as a torch.cuda.CUDAGraph
        self.graphs.begin_capture(graph)
        work()
        self.graphs.end_capture(graph)
        return graph

    def replay(self, graph: Any, times: int = 1) -> None:
        for _ in range(times):
            if self.graphs.begin_replay():
                self.graphs.end_replay(graph)

    def lines(self) -> list[dict[str, Any]]:
        """Stop, and return the steps that were written."""
        self.recorder.stop("exit")
        assert self.recorder.warnings == []
        return rows(self.recorder.folder)


def counts(steps: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(step["kind"], step["backwards"], step["optimizer_steps"]) for step in steps]


def plainly(job: Job) -> None:
    for _ in range(3):
        job.train()
    job.replay(job.capture(job.train), 5)


def before_it_trains(job: Job) -> None:
    graph = job.capture(job.train)
    assert not job.recorder.clock.started
    job.replay(graph, 4)


def with_a_loader(job: Job) -> None:
    job.fetch()
    job.train()
    whole, forward = job.capture(job.train), job.capture(job.forward)
    for graph in (whole, whole, whole, forward, forward):
        job.fetch()
        job.replay(graph)


def accumulating(job: Job) -> None:
    job.train()

    def both() -> None:
        job.forward()
        job.backward()

    graph = job.capture(both)
    for _ in range(4):
        job.replay(graph, 2)
        job.update()


def within_a_call(job: Job) -> None:
    """As those of make_graphed_callables and torch.compile(mode="reduce-overhead") are."""
    graph = job.capture(job.forward)
    for _ in range(3):
        job.forward(lambda: job.replay(graph))
        job.backward()
        job.update()


def capturing_within_a_call(job: Job) -> None:
    job.train()
    job.forward(lambda: job.capture(lambda: None))
    job.backward()
    job.update()
    assert job.recorder.clock.row.number == 2


def given_up(job: Job) -> None:
    """A capture that never ends is not waited for."""
    job.train()
    graph = type("Graph", (), {})()
    job.graphs.begin_capture(graph)
    job.forward()
    del graph
    job.train()
    job.graphs.end_capture(object())  # of one that never began
    job.train()
    assert job.recorder.device.captures == 0


def in_another_thread(job: Job) -> None:
    """What another thread captures is no work of the steps."""
    job.train()
    graph = type("Graph", (), {})()
    thread = threading.Thread(target=job.graphs.begin_capture, args=(graph,))
    thread.start()
    thread.join()
    assert job.recorder.device.captures == 1
    job.train()
    job.graphs.end_capture(graph)


TRAIN = ("train", 1, 1)
# What a script does, the steps that come of it, what marks them, and the graphs that were captured.
SCRIPTS: dict[str, tuple[Callable[[Job], object], list[tuple[str, int, int]], str, int]] = {
    "a capture is no step and a replay one": (plainly, [TRAIN] * 8, "optimizer", 1),
    "training begins with a replay": (before_it_trains, [TRAIN] * 4, "optimizer", 1),
    "a loader marks steps of two graphs": (with_a_loader, [TRAIN] * 4 + [("validation", 0, 0)] * 2, "loader", 2),
    "gradients accumulate in a graph": (accumulating, [TRAIN] + [("train", 2, 1)] * 4, "optimizer", 1),
    "two optimizer steps in a graph": (
        *(lambda job: job.replay(job.capture(lambda: (job.train(), job.train())), 3),),
        *([("train", 2, 2)] * 3, "optimizer", 1),
    ),
    "replays mark where nothing else does": (
        *(lambda job: (job.backward(), job.replay(job.capture(job.backward), 40)),),
        *([("train", 33, 0)] + [("train", 1, 0)] * 8, "replay", 1),
    ),
    "a replay within a module's call": (within_a_call, [TRAIN] * 3, "optimizer", 1),
    "a capture within a module's call": (capturing_within_a_call, [TRAIN] * 2, "optimizer", 1),
    "a capture in another thread": (in_another_thread, [TRAIN] * 2, "optimizer", 0),
    "a capture that is given up": (given_up, [TRAIN] * 3, "optimizer", 0),
}


@pytest.mark.parametrize(("script", "steps", "mark", "graphs"), SCRIPTS.values(), ids=SCRIPTS)
def test_steps_that_replay_graphs(script: Any, steps: Any, mark: str, graphs: int, tmp_path: Path) -> None:
    job = Job(tmp_path)
    script(job)
    lines = job.lines()
    assert counts(lines) == steps
    assert (job.recorder.clock.mark, job.recorder.observed.graphs) == (mark, graphs)
    assert not job.recorder.clock.capturing
    if script is capturing_within_a_call:
        assert all(line["forward_ns"] > 0 for line in lines)


def behind(job: Job, devices: Devices) -> None:
    """The device is three to four steps behind the host; events are used again."""
    for n in range(300):
        job.step(device_ns=(10 + n % 7) * MS, before_ns=1 * MS)
        assert len(rows(job.recorder.folder)) < max(n - 2, 2)  # those that the device is through with
        devices.now_ns = max(devices.queued_ns[0] - 45 * MS, 0)
    devices.now_ns = devices.queued_ns[0]
    assert devices.events < 10


def waiting(job: Job, devices: Devices) -> None:
    """The host waits for the device, and then for its loader. No other device is woken."""
    job.model, job.device = Model(Parameter(4, "cuda", 1)), 1
    for _ in range(4):
        job.step(device_ns=10 * MS)
        devices.now_ns = devices.queued_ns[1] + 30 * MS
    assert devices.awake == {1}


def capturing(job: Job, devices: Devices) -> None:
    """A step that is captured has no time, and its successor no beginning."""
    for n in range(6):
        job.step(device_ns=5 * MS, during=lambda n=n: setattr(devices, "capturing", n == 2))  # type: ignore[misc]
        devices.capturing = False
        devices.now_ns = devices.queued_ns[0]


def moving(job: Job, devices: Devices) -> None:
    """A larger model is on another device. The fourth step ends on the first one, where it did nothing."""
    larger = Model(Parameter(100, "cuda", 1))
    for n in range(6):
        if n == 3:
            job.model, job.device = larger, 1
        job.step(device_ns=5 * MS)
        devices.now_ns = max(devices.queued_ns)


def replaying(job: Job, devices: Devices) -> None:
    """A step is a replay of a graph."""
    devices.launch(0)
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


# What a job does, and how long its steps take on the device, each from the end of the one before; -1: not known.
TIMES: dict[Callable[[Job, Devices], None], list[int]] = {
    behind: [-1] + [(11 + n % 7) * MS for n in range(1, 300)],
    waiting: [-1] + [40 * MS] * 3,
    capturing: [-1, 5 * MS, -1, -1, 5 * MS, 5 * MS],
    moving: [-1, 5 * MS, 5 * MS, 0, -1, 5 * MS],
    replaying: [-1] + [11 * MS] * 3,
}


@pytest.mark.parametrize("script", TIMES)
def test_steps_are_timed_on_the_device(
    script: Callable[[Job, Devices], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(monkeypatch)
    job = Job(tmp_path, devices)
    script(job, devices)
    assert [line["device_step_ns"] for line in job.lines()] == TIMES[script]


def job_of(folder: Path, text: str) -> Path:
    path = folder / "job.py"
    path.write_text(dedent(text))
    return path


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
def test_captures_and_replays_of_pytorchs_own_class_are_counted_and_leave_no_attribute(tmp_path: Path) -> None:
    done = record(
        job_of(tmp_path, COMPILES_NOTHING + dedent(STAND_IN) + dedent(WHOLE)),
        folder=tmp_path / "run",
        options=["--window", "8,1,2"],
    )
    rank = tmp_path / "run/ranks/00000"
    assert counts(rows(rank)) == [TRAIN] * 23
    known = facts(rank)
    assert (known["warnings"], known["graphs"]) == ([], 1)
    assert [known["window"][key] for key in ("state", "first_step", "last_step")] == ["exported", 9, 10]
    assert done.stdout in ("['_tracker']\n", "[]\n")


# An event as torch 2.11 has it where CUDA can be used no more: in a fork's child its destructor ends the process.
FORKS = """
    import os
    import sys

    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    class Event:
        def __init__(self, **_):
            self.made_in = os.getpid()

        def record(self):
            pass

        def query(self):
            return True

        def elapsed_time(self, end):
            return 1.0

        def __del__(self):
            if os.getpid() != self.made_in:
                os.abort()

    if not torch.cuda.is_available():
        torch.version.cuda, torch.cuda.Event = "13.0", Event
        torch.cuda.is_initialized = torch._C._cuda_hasPrimaryContext = lambda *_: True
        torch.cuda.current_device, torch.cuda.is_current_stream_capturing = lambda: 0, lambda: False
    model = nn.Linear(8, 1).to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for rows in DataLoader(torch.randn(12, 8), 2, num_workers=1):
            model(rows.to(model.weight.device)).sum().backward()
            optimizer.step()
    if not (child := os.fork()):
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("on", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_no_event_of_ours_is_destroyed_in_a_forks_child(tmp_path: Path, on: str) -> None:
    if (on == "gpu") != torch.cuda.is_available():
        pytest.skip("needs a CUDA device" if on == "gpu" else "has a CUDA device")
    done = record(job_of(tmp_path, COMPILES_NOTHING + dedent(FORKS)), folder=tmp_path / "run", options=["--no-trace"])
    assert done.stdout == "7\n"
    assert any(row["device_step_ns"] > 0 for row in rows(tmp_path / "run/ranks/00000"))


SLEEPS = """
    import torch
    from torch import nn

    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 64, device="cuda")
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for n in range(30):
        if n == 10:
            begun.record()
        torch.cuda._sleep(20_000_000)
        model(x).sum().backward()
        optimizer.step()
        if n == 29:
            ended.record()
    ended.synchronize()
    print(begun.elapsed_time(ended) / 20)
"""


@pytest.mark.gpu
@NO_GPU
def test_a_real_devices_steps_are_as_long_as_events_of_the_script_measure(tmp_path: Path) -> None:
    done = record(job_of(tmp_path, SLEEPS), folder=tmp_path / "run", options=["--no-trace", "--flops", "off"])
    steps = [row["device_step_ns"] for row in rows(tmp_path / "run/ranks/00000")][10:30]
    assert sum(steps) / 20e6 == pytest.approx(float(done.stdout), rel=0.02)


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
@NO_GPU
def test_a_real_graphs_steps_are_counted_and_its_losses_are_those_without_dlprof(tmp_path: Path) -> None:
    path = job_of(tmp_path, REAL)
    plain = launch([sys.executable, path], tmp_path)
    done = record(path, folder=tmp_path / "run")
    assert json.loads(done.stdout) == json.loads(plain.stdout)
    rank = tmp_path / "run/ranks/00000"
    assert counts(rows(rank)) == [TRAIN] * 53
    assert facts(rank)["warnings"] == []
