"""The loss of each backward pass (`--losses`), and what a GradScaler does: skipped optimizer steps, and its scale.

Reading a loss waits for the device, so this is done on request alone, with the seed of a job whose losses are compared
with another run's. A scaler's scale and overflow flags are tensors on the device too, and are not read. But the scale
follows from its first value and the skipped steps, and the host knows whether an optimizer stepped. A fused optimizer
skips on the device itself, so with a GPU the host cannot know.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from dlprof.record import guarded
from dlprof.record.attribution import passing
from dlprof.record.captured import capture_test, unseen
from dlprof.record.hooks import hidden, put
from dlprof.record.log import WRITE_EVERY_NS, Part
from dlprof.record.ranks import find_rank
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

_MOST = 1_000_000  # losses that are written: 40 MB


class Losses:
    """Writes the log `losses`: keys and units as in the table `losses`. A float in JSON has all of its bits."""

    name = "losses"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._log: Part | None = None
        self._lines: list[str] = []
        self._left, self._written_ns = _MOST, 0
        # Of a gradient scaler: what it made, and of what.
        self._scaled: tuple[Callable[[], Any], Any] = (lambda: None, None)
        self._option = os.environ.get("DLPROF_LOSSES", "")
        if self._option:
            self._wrap_scalers()
        if self._option.isdigit():
            _seed(int(self._option) + find_rank())

    def start(self, recorder: Recorder) -> None:
        """Read losses from now on, the first backward pass's too."""
        if not self._option:
            return
        self._recorder = recorder
        self._log = recorder.log("losses")
        recorder.clock.losses = self
        if recorder.rank == 0:
            recorder.warn("the loss of each step is read (--losses): the host waits for the device in each")

    @guarded
    @unseen
    def see(self, tensors: Any = (), *_args: Any, **more: Any) -> None:
        """Keep the value of each scalar that torch.autograd.backward() is called with; waits for the device."""
        recorder = self._recorder
        if recorder is None or recorder.clock.capturing or self._left <= 0:
            return
        tensors = more.get("tensors", tensors)
        for root in tensors if isinstance(tensors, Sequence) else (tensors,):
            made, of = self._scaled
            loss = of if root is made() else root
            loss = getattr(loss, "_local_tensor", loss)  # of a DTensor: its ranks would exchange it
            if loss.numel() == 1 and loss.is_floating_point():
                value = float(loss.item())
                known = json.dumps(value) if math.isfinite(value) else "null"  # infinity and NaN are no JSON
                self._lines.append(f'{{"step":{recorder.clock.row.number},"loss":{known}}}\n')
                self._left -= 1

    def step(self, done: Sequence[Step]) -> None:
        """Write the rows collected so far."""
        now = done[-1].end_ns
        if now - self._written_ns >= WRITE_EVERY_NS:
            self._written_ns = now
            self._write()

    def stop(self) -> None:
        """Write the rest."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.clock.losses = None
        self._write()
        self._log = None

    def fail(self, error: Exception) -> None:
        """Switch off because a hook failed."""
        if self._recorder is not None:
            self._recorder.drop(self, error)

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if lines and self._log is not None:
            self._log.write("".join(lines))

    def _wrap_scalers(self) -> None:
        """Remember of what a gradient scaler's product was made, which is the loss."""
        import torch
        from torch.amp.grad_scaler import GradScaler

        scale, is_traced, is_captured = GradScaler.scale, torch.compiler.is_dynamo_compiling, capture_test()

        @functools.wraps(scale)
        def wrapper(scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return scale(scaler, outputs, *args, **kwargs)
            with passing:
                found = scale(scaler, outputs, *args, **kwargs)
            if isinstance(outputs, torch.Tensor) and found is not outputs and not is_captured():
                self._scaled = weakref.ref(found), outputs.detach()
            return found

        put(GradScaler, "scale", hidden(wrapper))


def _seed(number: int) -> None:
    """Seed what draws random numbers; torch has imported numpy where there is one."""
    import torch

    number %= 2**32
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


# This many skipped steps have a line each; later ones share a line per write. And so many scalers are followed.
_MOST_LINES = 10_000
_MOST_SCALERS = 100


@dataclass
class _Scale:
    """What is known of one scaler on the host."""

    number: int
    scale: float | None = None  # None if it was set to a tensor, or was created before the recording
    tracker: int = 0  # steps in a row that were not skipped
    at_ns: int = 0  # when it last stepped; below, in which step of the script
    step: int = 0
    began: bool = False  # its first line is written
    known: bool = True  # whether the host knows which steps are skipped
    skipped: bool = False  # a step since the last update
    stepped: bool = False


class LossScale:
    """Writes the log `loss_scale`: keys and units as in the table `loss_scale`."""

    name = "loss_scale"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._log: Part | None = None
        self._found: list[tuple[int, str, float | None, int, int, int]] = []
        self._scales: WeakKeyDictionary[Any, _Scale] = WeakKeyDictionary()
        self._lines = self._written_ns = 0
        self._kinds: set[type] = set()  # of scalers that were looked at
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
        is_traced, is_captured = torch.compiler.is_dynamo_compiling, capture_test()
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
            self._see_kind(scaler)
            row, now = recorder.clock.row, time.perf_counter_ns()
            before = row.number, row.optimizer_steps
            with passing:
                result = stepped(scaler, optimizer, *args, **kwargs)
            row = recorder.clock.row
            happened = (row.number, row.optimizer_steps) != before
            self._stepped(scaler, optimizer, happened, (recorder.unix(now), before[0]))
            return result

        put(kind, "_lazy_init_scale_growth_tracker", begun(made))
        put(kind, "load_state_dict", begun(loaded))
        put(kind, "step", hidden(step))
        put(kind, "update", self._around_update(updated))
        self._kinds.add(kind)

    def _around_update(self, original: Callable[..., Any]) -> Any:
        import torch

        is_traced, is_captured = torch.compiler.is_dynamo_compiling, capture_test()

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

    @guarded
    def _see_kind(self, scaler: Any) -> None:
        """Wrap a kind of scaler that updates in its own way, as FSDP's ShardedGradScaler does."""
        kind = type(scaler)
        if kind not in self._kinds:
            self._kinds.add(kind)
            if "update" in vars(kind):
                put(kind, "update", self._around_update(vars(kind)["update"]))

    def _known(self, scaler: Any) -> _Scale | None:
        """Return what is known of a scaler; of one that was created before the recording, its number alone."""
        if scaler not in self._scales and len(self._scales) < _MOST_SCALERS:
            self._scales[scaler] = _Scale(len(self._scales))
        return self._scales.get(scaler)

    @guarded
    def _begin(self, scaler: Any) -> None:
        """Read the scale that a scaler begins with or has loaded."""
        known = self._known(scaler)
        if known is not None and scaler.is_enabled():
            known.scale, known.tracker = float(scaler._init_scale), int(scaler._init_growth_tracker)
            if known.began:
                self._add("set", known)

    @guarded
    def _stepped(self, scaler: Any, optimizer: Any, happened: bool, when: tuple[int, int]) -> None:
        """Record a step of a scaler, and whether its optimizer stepped."""
        recorder = self._recorder
        if recorder is None:
            return
        if not recorder.observed.grad_scaler:  # of a kind that scales in its own way
            recorder.observed.grad_scaler = recorder.observed.news = True
        if (known := self._known(scaler)) is None:
            return
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
                if known.scale is not None:
                    larger = ctypes.c_float(known.scale * scaler.get_growth_factor()).value
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
            self._log = self._recorder.log("loss_scale")
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
