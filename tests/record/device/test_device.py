"""Which GPU is a rank's: where its parameters are, and never one that would have to be woken."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from dlprof.record.device.device import Events, RankDevice, most_on
from tests.fixtures.devices import Devices, Model, Parameter

torch = pytest.importorskip("torch", reason="recording needs torch")


class Broken:
    """A script's own module that fails when it is asked."""

    def parameters(self) -> Any:
        yield Parameter(10, "cuda", 1)
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


def test_a_model_that_fails_when_asked_costs_no_more_than_what_it_did_not_tell() -> None:
    assert found(Broken()) == 1


def test_a_model_that_comes_later_is_looked_at_and_one_that_was_seen_is_not_again() -> None:
    asked = []

    class Watched(Model):
        def parameters(self) -> Any:
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
