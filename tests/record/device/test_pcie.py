"""Bytes over PCIe, from counters that begin again, fail, or do not exist."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.samplers.gpu import Traffic, is_countable

SENT, RECEIVED = "pcie_sent_bytes_per_s", "pcie_received_bytes_per_s"
UNSIGNED, UNSIGNED_LONG_LONG = 1, 3  # nvmlValueType_t


class NVMLError(Exception):
    """Stands for pynvml's, of whose classes one is made for each error number."""

    def __new__(cls, number: int = 0) -> Any:
        return super().__new__(NotSupportedError if cls is NVMLError and number == 3 else cls)


class NotSupportedError(NVMLError):
    """There are no such counters."""


class LostError(NVMLError):
    """The GPU has fallen off the bus."""


class Nvml:
    """The driver, as far as it is asked for the counters."""

    NVML_SUCCESS = 0
    NVML_VALUE_TYPE_UNSIGNED_INT = UNSIGNED
    NVMLError = NVMLError

    def __init__(self) -> None:
        self.sent = self.received = 0
        self.kind = UNSIGNED
        self.refused: tuple[int, ...] = ()
        self.raises: Exception | None = None

    def nvmlDeviceGetFieldValues(self, _: object, fields: list[tuple[int, int]]) -> list[Any]:  # noqa: N802
        if self.raises is not None:
            raise self.raises
        counted = {197: self.sent, 198: self.received}
        return [
            SimpleNamespace(
                fieldId=field,
                nvmlReturn=3 if field in self.refused else 0,
                valueType=self.kind,
                value=SimpleNamespace(uiVal=counted[field] % (1 << 32), ullVal=counted[field]),
            )
            for field, _ in fields
        ]


class Link:
    """A link whose time and bytes the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        monkeypatch.setattr("dlprof.record.samplers.gpu.time.perf_counter_ns", lambda: self.now_ns)
        self.nvml = Nvml()
        self.traffic = Traffic(self.nvml, object(), (NotSupportedError,), (LostError,))

    def move(self, sent: int = 0, received: int = 0, ms: int = 100) -> bool:
        """Send and receive for so long, and count."""
        self.now_ns += ms * 1_000_000
        self.nvml.sent += sent
        self.nvml.received += received
        return self.traffic.count()


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    made = Link(monkeypatch)
    made.move()
    return made


def test_rates_are_bytes_by_the_time_that_was_counted_since_the_last_question(link: Link) -> None:
    assert link.traffic.rates() == {}
    assert link.move(sent=1_000_000, received=500_000)
    assert link.move(sent=2_000_000, received=500_000)
    assert link.traffic.rates() == {SENT: 15_000_000.0, RECEIVED: 5_000_000.0}
    assert link.traffic.rates() == {}
    link.move(sent=10)
    assert link.traffic.rates() == {SENT: 100.0, RECEIVED: 0.0}


def test_a_counter_of_32_bits_that_begins_again_goes_on(link: Link) -> None:
    link.move(sent=(1 << 32) - 1000)
    link.traffic.rates()
    link.move(sent=3000)
    assert link.traffic.rates()[SENT] == 30_000.0


def test_what_lies_too_far_apart_may_have_begun_again_more_than_once(link: Link) -> None:
    link.move(sent=1000, ms=131)
    assert link.traffic.rates() == {}
    link.move(sent=1000)
    assert link.traffic.rates()[SENT] == 10_000.0


def test_a_counter_of_64_bits_may_be_read_seldom_but_not_go_back(link: Link) -> None:
    link.nvml.kind = UNSIGNED_LONG_LONG
    link.move(sent=1 << 40, ms=1000)
    assert link.traffic.rates()[SENT] == float(1 << 40)
    link.move(sent=-5)  # the driver was loaded anew
    assert SENT not in link.traffic.rates()


def test_one_counter_is_enough_and_none_ends_the_asking(link: Link) -> None:
    link.nvml.refused = (197,)
    assert link.move(received=100)
    assert link.traffic.rates() == {RECEIVED: 1000.0}
    link.nvml.refused = (197, 198)
    assert not link.move()


def test_a_driver_that_fails_costs_a_reading_one_without_counters_all_and_a_lost_gpu_is_told(link: Link) -> None:
    link.nvml.raises = NVMLError()
    assert link.move(sent=100)
    link.nvml.raises = NVMLError(3)
    assert not link.move()
    link.nvml.raises = LostError()
    with pytest.raises(LostError):
        link.move()


@pytest.mark.parametrize(("generation", "countable"), [(3, True), (4, True), (5, False), (None, True)])
def test_counters_are_fast_enough_for_links_up_to_pcie_4(generation: int | None, countable: bool) -> None:
    def ask(_: object) -> int:
        if generation is None:
            raise NVMLError
        return generation

    nvml = SimpleNamespace(NVMLError=NVMLError, nvmlDeviceGetMaxPcieLinkGeneration=ask)
    assert is_countable(nvml, object()) is countable
