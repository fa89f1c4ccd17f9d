"""Which GPU is a rank's, that no other is woken, and how long steps take on one that the host runs ahead of."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.record.collectors.steps import Steps
from dlprof.record.device.device import Events, RankDevice, most_on
from dlprof.record.recorder import Recorder
from tests.fixtures.devices import Devices, Model, Parameter
from tests.fixtures.jobs import record, rows

torch = pytest.importorskip("torch", reason="recording needs torch")


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


def found(*models: Any, optimizers: tuple[Any, ...] = ()) -> int | None:
    device = RankDevice()
    device.look([weakref.ref(m) for m in models], [weakref.ref(o) for o in optimizers])
    return device.index


def test_the_device_is_where_most_parameters_are() -> None:
    spread = Model(Parameter(5, "cuda", 0), Parameter(30, "cuda", 2), Parameter(900, "cpu"), Parameter(30, "cuda", 0))
    assert found(spread) == 0
    discriminator = Model(Parameter(70, "cuda", 3))
    assert found(spread, discriminator) == 3
    assert found(Model(Parameter(9, "cpu"))) is None
    assert found(torch.nn.Linear(2, 2)) is None
    assert most_on([Parameter(4, "cuda", 1), Parameter(4, "cuda", 0)]) == 0


def test_without_a_module_it_is_where_the_optimizer_steps() -> None:
    optimizer = Optimizer(Parameter(3, "cuda", 1))
    assert found(optimizers=(optimizer,)) == 1
    # Modules tell it better: what an optimizer steps may have been moved to the host.
    assert found(Model(Parameter(1, "cuda", 2)), optimizers=(optimizer,)) == 2


def test_a_model_that_fails_when_asked_is_read_as_torch_has_it() -> None:
    assert found(Broken()) == 1


def test_a_model_that_comes_later_is_looked_at_and_one_that_was_seen_is_not_again() -> None:
    asked = []

    class Watched(Model):
        def parameters(self, recurse: bool = True) -> Any:  # noqa: ARG002
            asked.append(self)
            return super().parameters()

    first, second = Watched(Parameter(1, "cpu")), Watched(Parameter(1, "cuda", 1))
    models: list[Any] = [weakref.ref(first)]
    device = RankDevice()
    device.look(models, [])
    device.look(models, [])
    assert (device.index, asked) == (None, [first])
    models.append(weakref.ref(second))
    device.look(models, [])
    assert device.index == 1


def test_the_current_device_counts_where_parameters_tell_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RankDevice().in_use() is None  # CUDA sleeps, and nobody may wake it
    devices = Devices(monkeypatch)
    devices.current = 1
    device = RankDevice()
    assert device.in_use() is None  # nobody has used it yet, and it is not for us to
    devices.launch(1, device=1)
    assert device.in_use() == 1
    device.index = 0
    assert device.in_use() == 0


def test_events_are_recorded_on_their_device_and_no_other_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)
    devices.launch(7_000, device=1)
    event = Events(1).record()
    assert (devices.awake, devices.current) == ({1}, 0)
    assert not event.query()
    devices.now_ns = 7_000
    assert event.query()


def test_no_event_goes_into_a_graph_and_released_ones_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)
    events = Events(0)
    devices.capturing = True
    assert events.record() is None
    devices.capturing = False
    first = events.record()
    second = events.record()
    assert second is not first
    events.release(first)
    assert events.record() is first


MS = 1_000_000


class Job:
    """A loop that fetches nothing: each step is a forward, a backward, and a step of an optimizer."""

    def __init__(self, folder: Path, devices: Devices, device: int = 0) -> None:
        self.recorder = Recorder(folder, [Steps])
        self.devices = devices
        self.device = device
        self.model = Model(Parameter(4, "cuda", device))
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def step(self, device_ns: int, before_ns: int = 0, during: Callable[[], None] = lambda: None) -> None:
        """Launch some work before the first forward, and the rest in it."""
        if before_ns:
            self.devices.launch(before_ns, self.device)
        assert self.recorder.clock.begin_forward(self.model)
        self.devices.launch(device_ns, self.device)
        self.recorder.clock.end()
        assert self.recorder.clock.begin_backward()
        self.recorder.clock.end()
        self.recorder.clock.begin_optimizer(self.optimizer)
        during()
        self.recorder.clock.end_optimizer()
        if not self.devices.capturing:
            self.recorder.pass_on()

    def lines(self) -> list[dict[str, Any]]:
        """Stop, and return what was written."""
        self.recorder.stop("exit")
        assert self.recorder.warnings == []
        text = (self.recorder.folder / "steps.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


def told(lines: list[dict[str, Any]]) -> list[int]:
    return [line["device_step_ns"] for line in lines]


def test_a_step_lasts_from_the_end_of_the_one_before_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(monkeypatch)
    job = Job(tmp_path, devices)
    for n in range(6):
        job.step(device_ns=(40 + n) * MS, before_ns=2 * MS)
    # The host is through with all six, and the device with none: only the first, which has no beginning, is written.
    assert job.recorder.folder.joinpath("steps.jsonl").read_text().count("\n") == 1
    devices.now_ns = 1_000 * MS
    lines = job.lines()
    # Nothing is known of the time before training was seen: the clock begins with the first backward.
    assert told(lines) == [-1] + [(42 + n) * MS for n in range(1, 6)]


def test_times_stay_right_while_events_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)
    job = Job(tmp_path, devices)
    for n in range(300):
        job.step(device_ns=(10 + n % 7) * MS, before_ns=1 * MS)
        # The device is three to four steps behind.
        devices.now_ns = max(devices.queued_ns[0] - 45 * MS, 0)
    devices.now_ns = devices.queued_ns[0]
    lines = job.lines()
    assert told(lines)[1:] == [(11 + n % 7) * MS for n in range(1, 300)]
    assert devices.events < 10


def test_what_the_device_waits_between_steps_is_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)
    job = Job(tmp_path, devices)
    for _ in range(4):
        job.step(device_ns=10 * MS)
        # The host waits for the device, and then for its loader.
        devices.now_ns = devices.queued_ns[0] + 30 * MS
    lines = job.lines()
    assert told(lines)[1:] == [40 * MS] * 3


def test_a_step_that_is_captured_has_no_time_and_its_successor_no_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(monkeypatch)
    job = Job(tmp_path, devices)

    def capture() -> None:
        devices.capturing = True

    def release() -> None:
        devices.capturing = False

    for n in range(6):
        job.step(device_ns=5 * MS, during=capture if n == 2 else release)
        devices.capturing = False
        devices.now_ns = devices.queued_ns[0]
    lines = job.lines()
    assert told(lines) == [-1, 5 * MS, -1, -1, 5 * MS, 5 * MS]


def test_a_rank_that_never_set_its_device_wakes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)
    job = Job(tmp_path, devices, device=1)
    for _ in range(3):
        job.step(device_ns=5 * MS)
        devices.now_ns = devices.queued_ns[1]
    assert told(job.lines())[1:] == [5 * MS] * 2
    assert devices.awake == {1}


def test_a_model_on_another_device_than_the_one_so_far_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(monkeypatch)
    job = Job(tmp_path, devices)
    larger = Model(Parameter(100, "cuda", 1))
    for n in range(6):
        if n == 3:
            job.model, job.device = larger, 1
        job.step(device_ns=5 * MS)
        devices.now_ns = max(devices.queued_ns)
    # The fourth ends on the first device, where it did nothing.
    assert told(job.lines()) == [-1, 5 * MS, 5 * MS, 0, -1, 5 * MS]


def test_steps_that_share_a_line_share_their_device_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlprof.record.collectors.steps._EACH_STEPS", 2)
    devices = Devices(monkeypatch)
    job = Job(tmp_path, devices)
    for _ in range(8):
        job.step(device_ns=1 * MS, before_ns=1 * MS)
        devices.now_ns = devices.queued_ns[0]
    *_, last = job.lines()
    assert (last["steps"], last["device_step_ns"]) == (6, 12 * MS)


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
    for _ in range(5):
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
    job = tmp_path / "job.py"
    job.write_text(dedent(FORKS))
    done = record(job, folder=tmp_path / "run")
    assert done.stdout == "7\n"
    assert any(row["device_step_ns"] > 0 for row in rows(tmp_path / "run/ranks/00000"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_devices_steps_are_as_long_as_events_of_the_script_say(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(dedent(SLEEPS))
    done = record(job, folder=tmp_path / "run", options=["--no-trace", "--flops", "off"])
    steps = [row["device_step_ns"] for row in rows(tmp_path / "run/ranks/00000")][10:30]
    assert sum(steps) / 20e6 == pytest.approx(float(done.stdout), rel=0.02)
