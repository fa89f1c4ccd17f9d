"""What PyTorch's CUDA allocator holds over the job and, where asked for, the history of its allocations.

The allocator's own counters are read a few times a second, of the device that the rank trains on; nothing is reset,
since the script may use the peaks itself. A job that does not use CUDA leaves no file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dlprof.files import whole
from dlprof.record.log import Log
from dlprof.record.recorder import Recorder
from dlprof.record.stepping import Step

# The counters come as a dictionary of a hundred entries: they are read this often, however short a step is, and
# written as often as the lines of steps are, see collectors/steps.py.
_READ_EVERY_NS = 250_000_000

# Allocations and frees that the history keeps, the latest: some tens of megabytes on disk, with their stacks.
_HISTORY_ENTRIES = 100_000

_SNAPSHOT = "memory_snapshot.pickle"


class Memory:
    """Writes memory.jsonl: keys and units as in the table `memory`; with --memory also memory_snapshot.pickle."""

    name = "memory"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._cuda: Any = None
        self._ask: Any = None  # gives a device's counters
        self._log: Log | None = None
        self._read_ns = 0
        self._history = "asked" if os.environ.get("DLPROF_MEMORY") == "on" else "off"

    def start(self, recorder: Recorder) -> None:
        """Look whether there is an allocator to ask."""
        import torch

        self._recorder = recorder
        self._cuda = torch.cuda
        self._ask = getattr(torch._C, "_cuda_memoryStats", None)
        if self._ask is None and self._history == "asked":
            recorder.warn("no history of memory: this PyTorch was built without CUDA")
            self._history = "off"
        self._begin_history()

    def step(self, done: Sequence[Step]) -> None:
        """Read the counters, if the last reading is old enough."""
        now = done[-1].start_ns + done[-1].dur_ns
        if self._ask is not None and now - self._read_ns >= _READ_EVERY_NS:
            self._read_ns = now
            self._begin_history()
            self._read(now, done[-1].number)

    def stop(self) -> None:
        """Close the file, and leave the history on disk."""
        if self._log is not None:
            self._log.close()
        if self._history == "on":
            self._history = "off"
            self._dump()

    def _read(self, now: int, number: int) -> None:
        recorder = self._recorder
        device = recorder.device.in_use() if recorder is not None else None
        if recorder is None or device is None:
            return
        told = self._ask(device)
        if self._log is None:
            self._log = Log(recorder.folder / "memory.jsonl")
        allocated, reserved = told["allocated_bytes"]["all"], told["reserved_bytes"]["all"]
        self._log.write(
            f'{{"at_ns":{recorder.unix(now)},"step":{number},"device":{device},'
            f'"allocated_bytes":{allocated["current"]},"reserved_bytes":{reserved["current"]},'
            f'"peak_allocated_bytes":{allocated["peak"]},"peak_reserved_bytes":{reserved["peak"]},'
            f'"retries":{_count(told, "num_alloc_retries")},"ooms":{_count(told, "num_ooms")},'
            f'"device_allocs":{_count(told, "num_device_alloc")},"device_frees":{_count(told, "num_device_free")}}}\n'
        )

    def _begin_history(self) -> None:
        """Begin to record allocations, once the script has woken CUDA and unless it records them itself."""
        recorder = self._recorder
        if self._history != "asked" or recorder is None or not self._cuda.is_initialized():
            return
        import torch

        bindings: Any = torch._C
        self._history = "off"
        if bindings._cuda_isHistoryEnabled():
            recorder.warn("no history of memory: the script records one itself")
            return
        self._cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES, stacks="python")
        bindings._cuda_attach_out_of_memory_observer(self._out_of_memory)
        self._history = "on"

    def _out_of_memory(self, *_: object) -> None:
        # Called by the allocator before it raises the script's error, of which ours must not take the place.
        try:
            if self._history == "on":
                self._dump()
        except Exception as e:  # noqa: BLE001 - see above
            if self._recorder is not None:
                self._recorder.warn(f"no history of memory at its end: {type(e).__name__}: {e}")

    def _dump(self) -> None:
        if self._recorder is None:
            return
        with whole(self._recorder.folder / _SNAPSHOT) as part:
            self._cuda.memory._dump_snapshot(str(part))


def _count(told: Any, name: str) -> str:
    """Write a counter as JSON; null where this version of PyTorch does not have it."""
    value = told.get(name)
    return "null" if value is None else str(int(value))
