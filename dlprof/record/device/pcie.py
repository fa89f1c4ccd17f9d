"""How much a GPU sends and receives over PCIe, from counters that soon begin again at 0.

nvmlDeviceGetPcieThroughput would wait for 20 ms each time. The counters have 32 bits on the drivers seen so far, and
"can be wrapped" (nvml.h): 31.5 GB/s, which PCIe 4.0 carries over 16 lanes, fill them in 0.136 s. So they are read every
0.1 s, and what lies further apart is not counted. GPUs with faster links, Hopper and later, have GPM for it.

They count bytes on the link, with the headers of packets: on an H200 (driver 580), 276 for each 256 that were copied to
it. Copying 5,368,709,120 bytes moved the counter on by 1,493,196,000 and once around.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

COUNT_S = 0.1
_LONGEST_NS = 130_000_000
_FASTEST_GENERATION = 4

_FIELDS = {197: "pcie_sent_bytes_per_s", 198: "pcie_received_bytes_per_s"}  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES, RX_BYTES
RATES = frozenset(_FIELDS.values())

# The member of nvmlValue_t that holds a value, by nvmlValueType_t.
MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

Errors = tuple[type[Exception], ...]


class Traffic:
    """The bytes over one GPU's link, as differences of its counters add up."""

    def __init__(self, nvml: Any, handle: Any, refusals: Errors, ends: Errors) -> None:
        """Take NVML's errors that mean that there are no counters, and that there is no GPU any more."""
        self._nvml = nvml
        self._handle = handle
        self._refusals = refusals
        self._ends = ends
        self._last: dict[int, tuple[int, int]] = {}  # field → what it was, and when
        self._counted: dict[int, tuple[int, int]] = {}  # field → bytes, and the ns that they took

    def count(self) -> bool:
        """Count on from the last reading; False: this GPU or driver has no such counters. Raises NVMLError: it is gone.

        Any other failure is one reading less.
        """
        try:
            values = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(field, 0) for field in _FIELDS])
        except self._refusals:
            return False
        except self._ends:
            raise
        except self._nvml.NVMLError:
            return True
        now = time.perf_counter_ns()
        refused = 0
        for value in values:
            if value.nvmlReturn == self._nvml.NVML_SUCCESS:
                wraps = value.valueType == self._nvml.NVML_VALUE_TYPE_UNSIGNED_INT
                self._add(value.fieldId, getattr(value.value, MEMBERS[value.valueType]), now, wraps)
            else:
                refused += isinstance(self._nvml.NVMLError(value.nvmlReturn), self._refusals)
        return refused < len(_FIELDS)

    def _add(self, field: int, is_now: int, now: int, wraps: bool) -> None:
        was, at = self._last.get(field, (is_now, now))
        self._last[field] = is_now, now
        sound = now - at <= _LONGEST_NS if wraps else is_now >= was
        if now > at and sound:
            counted, took = self._counted.get(field, (0, 0))
            self._counted[field] = counted + (is_now - was) % (1 << 32 if wraps else 1 << 64), took + now - at

    def rates(self) -> Mapping[str, float]:
        """Return the bytes a second since this was asked last, over the time that could be counted."""
        counted, self._counted = self._counted, {}
        return {_FIELDS[field]: round(sent / took * 1e9, 1) for field, (sent, took) in counted.items()}


def is_countable(nvml: Any, handle: Any) -> bool:
    """Return whether a GPU's link is slow enough for counters of 32 bits that are read every 0.1 s."""
    try:
        generation: int = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    except nvml.NVMLError:
        return True
    return generation <= _FASTEST_GENERATION
