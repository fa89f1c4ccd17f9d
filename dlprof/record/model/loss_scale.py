"""Records what a GradScaler does: which optimizer steps it skips, and how its scale changes.

The scale and the overflow flags are tensors on the device, and reading them would wait for it. But the scale follows
from its first value and the skipped steps, and the host knows whether an optimizer stepped. A fused optimizer skips on
the device itself, so with a GPU the host cannot know.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from dlprof.record import guarded
from dlprof.record.calls.attribution import passing
from dlprof.record.captured import capture_test
from dlprof.record.hooks import hidden, put
from dlprof.record.log import WRITE_EVERY_NS, Log
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

# This many skipped steps have a line each; later ones share a line per write.
_MOST_LINES = 10_000


@dataclass
class _Scale:
    """What is known of one scaler on the host."""

    number: int
    scale: float | None  # None if it was set to a tensor, or was created before the recording
    tracker: int  # steps in a row that were not skipped
    at_ns: int = 0  # when it last stepped; below, in which step of the script
    step: int = 0
    began: bool = False  # its first line is written
    known: bool = True  # whether the host knows which steps are skipped
    skipped: bool = False  # a step since the last update
    stepped: bool = False


def _nothing(_scaler: Any) -> None:
    """Do nothing, in a torch whose scalers are not known."""


class LossScale:
    """Writes loss_scale.jsonl: keys and units as in the table `loss_scale`."""

    name = "loss_scale"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._log: Log | None = None
        self._found: list[tuple[int, str, float | None, int, int, int]] = []
        self._scales: WeakKeyDictionary[Any, _Scale] = WeakKeyDictionary()
        self._lines = self._written_ns = 0
        self._kinds: set[type] = set()  # of scalers that were looked at, besides torch's own
        self._of_kind: Callable[[Any], None] = _nothing
        self._wrap()

    def start(self, recorder: Recorder) -> None:
        """Record scalers from now on; the file is created with the first line."""
        os.register_at_fork(after_in_child=self._disarm)
        self._recorder = recorder

    def step(self, done: Sequence[Step]) -> None:
        """Write the rows collected so far."""
        now = done[-1].end_ns
        if self._found and now - self._written_ns >= WRITE_EVERY_NS:
            self._written_ns = now
            self._write()

    def stop(self) -> None:
        """Write the rest."""
        try:
            self._write()
        finally:
            self._disarm()
            if self._log is not None:
                self._log.close()

    def fail(self, error: Exception) -> None:
        """Switch off because a hook failed."""
        if self._recorder is not None:
            self._recorder.drop(self, error)

    def _disarm(self) -> None:
        self._recorder = None
        self._found.clear()

    # -- wrappers

    def _wrap(self) -> None:
        import torch
        from torch.amp.grad_scaler import GradScaler

        kind: Any = GradScaler
        methods = ("_lazy_init_scale_growth_tracker", "load_state_dict", "step", "update")
        if not all(hasattr(kind, name) for name in methods):
            return  # an unknown version of torch
        is_traced = getattr(torch.compiler, "is_dynamo_compiling", torch.compiler.is_compiling)
        is_captured = capture_test()
        made, loaded, stepped, updated = (getattr(kind, name) for name in methods)

        def begun(original: Callable[..., Any]) -> Any:
            @functools.wraps(original)
            def method(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                if is_traced():
                    return original(scaler, *args, **kwargs)
                with passing:
                    result = original(scaler, *args, **kwargs)
                self._begin(scaler)
                return result

            return hidden(method)

        @functools.wraps(stepped)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return stepped(scaler, optimizer, *args, **kwargs)
            recorder = None if is_captured() else self._recorder
            if recorder is None or get_ident() != recorder.clock.owner or not scaler.is_enabled():
                with passing:
                    return stepped(scaler, optimizer, *args, **kwargs)
            self._see(scaler)
            row, now = recorder.clock.row, time.perf_counter_ns()
            before = row.number, row.optimizer_steps
            with passing:
                result = stepped(scaler, optimizer, *args, **kwargs)
            row = recorder.clock.row
            happened = (row.number, row.optimizer_steps) != before
            self._stepped(scaler, optimizer, happened, (recorder.unix(now), before[0]))
            return result

        def updating(original: Callable[..., Any]) -> Any:
            @functools.wraps(original)
            def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                if is_traced():
                    return original(scaler, *args, **kwargs)
                counts = not is_captured() and self._recorder is not None and scaler.is_enabled()
                if counts:
                    self._look(scaler)
                with passing:
                    result = original(scaler, *args, **kwargs)
                if counts:
                    self._updated(scaler, *args, **kwargs)
                return result

            return hidden(update)

        put(kind, "_lazy_init_scale_growth_tracker", begun(made))
        put(kind, "load_state_dict", begun(loaded))
        put(kind, "step", hidden(step))
        put(kind, "update", updating(updated))

        def of_kind(scaler: Any) -> None:
            """Watch a kind of scaler that updates in its own way, as FSDP's ShardedGradScaler does."""
            own = type(scaler)
            if own not in self._kinds and own is not kind:
                self._kinds.add(own)
                if "update" in vars(own):
                    put(own, "update", updating(vars(own)["update"]))

        self._of_kind = of_kind

    @guarded
    def _see(self, scaler: Any) -> None:
        """Watch the kind of a scaler."""
        self._of_kind(scaler)

    @guarded
    def _begin(self, scaler: Any) -> None:
        """Read the scale that a scaler begins with or has loaded."""
        known = self._scales.get(scaler)
        if known is None and len(self._scales) < 100:
            known = self._scales[scaler] = _Scale(len(self._scales), None, 0)
        if known is not None and scaler.is_enabled():
            known.scale, known.tracker = float(scaler._init_scale), int(scaler._init_growth_tracker)
            if known.began:
                self._add("set", known)

    @guarded
    def _stepped(self, scaler: Any, optimizer: Any, happened: bool, when: tuple[int, int]) -> None:
        """Record a step of a scaler, and whether its optimizer stepped."""
        recorder, known = self._recorder, self._scales.get(scaler)
        if recorder is None:
            return
        if not recorder.observed.grad_scaler:  # of a kind that scales in its own way
            recorder.observed.grad_scaler = recorder.observed.news = True
        if known is None:  # it was created before the recording
            if len(self._scales) >= 100:
                return
            known = self._scales[scaler] = _Scale(len(self._scales), None, 0)
        known.at_ns, known.step = when
        if not known.began:
            known.began = True
            self._add("began", known, int(scaler.get_growth_interval()))
        known.stepped = True
        if happened:
            if known.known and getattr(optimizer, "_step_supports_amp_scaling", False) and not _on_host(scaler):
                known.known = False
                self._add("unknown", known)
            return
        known.skipped = True
        # For the step log a skipped step is an optimizer step too: it ends a step as one does.
        recorder.clock.begin_optimizer(optimizer)
        recorder.clock.end_optimizer()

    @guarded
    def _look(self, scaler: Any) -> None:
        """On a CPU, find out whether a fused optimizer has skipped: its overflow flags are in the host's memory."""
        known = self._scales.get(scaler)
        if known is not None and known.stepped and not known.skipped and _on_host(scaler):
            states = scaler._per_optimizer_states.values()
            flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
            # Read without an operator of torch, which would be in the trace.
            known.skipped = any(ctypes.c_float.from_address(flag.data_ptr()).value != 0.0 for flag in flags)

    @guarded
    def _updated(self, scaler: Any, new_scale: Any = None) -> None:
        """Compute the scale as `_amp_update_scale_` does on the device (aten/src/ATen/native/cuda/AmpKernels.cu)."""
        known = self._scales.get(scaler)
        if known is None or not known.stepped:
            return
        skipped, known.skipped, known.stepped = known.skipped, False, False
        if not known.known:
            return
        if new_scale is not None:
            known.scale = float(new_scale) if isinstance(new_scale, (int, float)) else None
            self._add("skipped" if skipped else "set", known)
        elif skipped:
            known.tracker = 0
            if known.scale is not None:
                known.scale = ctypes.c_float(known.scale * scaler.get_backoff_factor()).value
            self._add("skipped", known)
        else:
            known.tracker += 1
            if known.tracker == scaler.get_growth_interval():
                known.tracker = 0
                self._grow(known, scaler.get_growth_factor())

    def _grow(self, known: _Scale, factor: float) -> None:
        if known.scale is not None:
            larger = ctypes.c_float(known.scale * factor).value
            if math.isfinite(larger) and larger != known.scale:
                known.scale = larger
                self._add("grown", known)

    # -- writing

    def _add(self, kind: str, known: _Scale, interval: int = -1) -> None:
        if self._recorder is not None:
            self._found.append((known.at_ns, kind, known.scale, known.number, known.step, interval))

    def _write(self) -> None:
        found, self._found = self._found, []
        if not found or self._recorder is None:
            return
        if self._log is None:
            self._log = Log(self._recorder.folder / "loss_scale.jsonl")
        counts = [1] * len(found)
        if self._lines > _MOST_LINES:
            last = {(row[1], row[3]): row for row in found}  # the last row of each kind and scaler
            counts = [sum((row[1], row[3]) == key for row in found) for key in last]
            found = list(last.values())
        self._lines += len(found)
        self._log.write("".join(map(_line, found, counts)))


def _on_host(scaler: Any) -> bool:
    """Return whether a scaler's tensors are in the host's memory, where reading them does not wait."""
    return scaler._scale is not None and scaler._scale.device.type == "cpu"


def _line(row: tuple[int, str, float | None, int, int, int], count: int) -> str:
    at, kind, scale, number, step, interval = row
    value = "null" if scale is None or not math.isfinite(scale) else repr(scale)
    return (
        f'{{"at_ns":{at},"kind":"{kind}","scale":{value},"scaler":{number},"step":{step},"interval":{interval},'
        f'"count":{count}}}\n'
    )
