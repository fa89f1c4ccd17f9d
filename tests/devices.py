"""GPUs that exist only in a test: CUDA's rules for streams, events, contexts and captures, with a clock set by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Devices:
    """Stands where torch.cuda calls the driver. Each device has one stream, which does what is launched in order.

    What CUDA refuses is refused here as well: an event is of one device, cannot be compared before the device has come
    to it, and can be neither recorded nor queried while the stream is captured.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
        self.now_ns = 0  # how far all devices have come
        self.queued_ns = [0] * count  # when each will be through with what was launched
        self.current = 0
        self.awake: set[int] = set()  # devices with a context
        self.capturing = False
        self.events = 0
        torch: Any = pytest.importorskip("torch", reason="recording needs torch")
        monkeypatch.setattr(torch.version, "cuda", "12.6")
        for name, stands in {
            "is_initialized": lambda: True,
            "current_device": lambda: self.current,
            "device": self._device,
            "is_current_stream_capturing": lambda: self.capturing,
            "Event": lambda **_: Event(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stands)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in self.awake, raising=False)

    @contextmanager
    def _device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def launch(self, ns: int, device: int = 0) -> None:
        """Queue so much work; the host goes on at once."""
        self.awake.add(device)
        self.queued_ns[device] = max(self.queued_ns[device], self.now_ns) + ns


class Event:
    """A timing event."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._device: int | None = None
        self._at_ns = 0
        devices.events += 1

    def record(self) -> None:
        """Queue the event on the current device's stream."""
        devices = self._devices
        if devices.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self._device not in (None, devices.current):
            raise RuntimeError("Event device does not match recording stream's device")
        self._device = devices.current
        devices.awake.add(devices.current)
        self._at_ns = max(devices.queued_ns[devices.current], devices.now_ns)

    def query(self) -> bool:
        """Return whether the device has come to it."""
        if self._devices.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self._at_ns <= self._devices.now_ns

    def elapsed_time(self, end: Event) -> float:
        """Return the ms from this event to a later one."""
        if self._device != end._device:
            raise RuntimeError("both events must be of one device")
        if max(self._at_ns, end._at_ns) > self._devices.now_ns:
            raise RuntimeError("device not ready")
        return (end._at_ns - self._at_ns) / 1e6


class Parameter:
    """A tensor on a device of these, as far as it is asked where it lies and how large it is."""

    def __init__(self, elements: int, device: str, index: int | None = None) -> None:
        self.device = Place(device, index)
        self._elements = elements

    def numel(self) -> int:
        """Return how many elements it has."""
        return self._elements


class Place:
    """What torch.device tells."""

    def __init__(self, kind: str, index: int | None) -> None:
        self.type = kind
        self.index = index


class Model:
    """A module, as far as its parameters are asked for."""

    def __init__(self, *parameters: Parameter) -> None:
        self._parameters = parameters

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters."""
        yield from self._parameters
