"""Records the memory of PyTorch's CUDA allocator during the job and, with --memory, the history of its allocations.

The allocator's own counters of the rank's device are read a few times a second. Nothing is reset, since the script may
use the peaks itself. A job that does not use CUDA leaves no file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from dlprof.files import whole
from dlprof.plain import words_of
from dlprof.record.log import Part
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

# The counters come as a dictionary of a hundred entries, so they are read this often, even if steps are shorter.
_READ_EVERY_NS = 250_000_000

# The history keeps this many of the latest allocations and frees: some tens of megabytes on disk, with their stacks.
_HISTORY_ENTRIES = 100_000


class Memory:
    """Writes the log `memory`: keys and units as in the table `memory`; with --memory also memory_snapshot.pickle."""

    name = "memory"
    _recorder: Recorder

    def __init__(self) -> None:
        self._counters: Any = None  # function of a device's index
        self._log: Part | None = None
        self._read_ns = 0
        self._history = "wanted" if os.environ.get("DLPROF_MEMORY") == "on" else "off"

    def start(self, recorder: Recorder) -> None:
        """Find the allocator's counters, if this PyTorch has them."""
        import torch

        self._recorder = recorder
        self._counters = getattr(torch._C, "_cuda_memoryStats", None)
        if self._counters is None and self._history == "wanted":
            recorder.warn("no history of memory: this PyTorch was built without CUDA")
            self._history = "off"
        self._begin_history()

    def step(self, done: Sequence[Step]) -> None:
        """Read the counters if the last reading is old enough."""
        now = done[-1].end_ns
        if self._counters is not None and now - self._read_ns >= _READ_EVERY_NS:
            self._read_ns = now
            self._begin_history()
            self._read(now, done[-1].number)

    def stop(self) -> None:
        """Write the history to disk."""
        if self._history == "on":
            self._history = "off"
            self._dump()
            import torch

            memory: Any = torch.cuda.memory
            memory._record_memory_history(enabled=None)

    def _read(self, now: int, number: int) -> None:
        device = self._recorder.device.in_use()
        if device is None:
            return
        counters = self._counters(device)
        allocated, reserved = counters["allocated_bytes"]["all"], counters["reserved_bytes"]["all"]
        row = {
            "at_ns": self._recorder.unix(now),
            "step": number,
            "device": device,
            "allocated_bytes": allocated["current"],
            "reserved_bytes": reserved["current"],
            "peak_allocated_bytes": allocated["peak"],
            "peak_reserved_bytes": reserved["peak"],
            # null where this version of PyTorch does not have it
            "retries": counters.get("num_alloc_retries"),
            "ooms": counters.get("num_ooms"),
            "device_allocs": counters.get("num_device_alloc"),
            "device_frees": counters.get("num_device_free"),
        }
        self._log = self._log or self._recorder.log("memory")
        self._log.write(json.dumps(row, separators=(",", ":")) + "\n")

    def _begin_history(self) -> None:
        """Start recording allocations once the script has initialized CUDA, unless it records them itself."""
        import torch

        cuda: Any = torch.cuda
        bindings: Any = torch._C
        if self._history != "wanted" or not cuda.is_initialized():
            return
        self._history = "off"
        if bindings._cuda_isHistoryEnabled():
            self._recorder.warn("no history of memory: the script records one itself")
            return
        cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES, stacks="python")
        bindings._cuda_attach_out_of_memory_observer(self._out_of_memory)
        self._history = "on"

    def _out_of_memory(self, *_: object) -> None:
        # The allocator calls this before it raises the script's error; an error of ours must not replace that.
        try:
            if self._history == "on":
                self._dump()
        except Exception as e:  # noqa: BLE001 - see above
            self._recorder.warn(f"no history of memory at its end: {words_of(e)}")

    def _dump(self) -> None:
        import torch

        memory: Any = torch.cuda.memory
        with whole(self._recorder.folder / "memory_snapshot.pickle") as part:
            memory._dump_snapshot(str(part))
