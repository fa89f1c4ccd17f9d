"""The loss of each backward pass, and the seed of a job whose losses are compared with another run's: `--losses`.

Reading a loss waits for the device, so this is done on request alone.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from dlprof.record import guarded
from dlprof.record.calls.attribution import passing
from dlprof.record.captured import capture_test, unseen
from dlprof.record.hooks import hidden, put
from dlprof.record.log import WRITE_EVERY_NS, Log
from dlprof.record.ranks import find_rank
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

_MOST = 1_000_000  # losses that are written: 40 MB


class Losses:
    """Writes losses.jsonl: keys and units as in the table `losses`. A float in JSON has all of its bits."""

    name = "losses"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._log: Log | None = None
        self._lines: list[str] = []
        self._left, self._written_ns = _MOST, 0
        # Of a gradient scaler: what it made, and of what.
        self._scaled: tuple[Callable[[], Any], Any] = (lambda: None, None)
        self._asked = os.environ.get("DLPROF_LOSSES", "")
        if self._asked:
            self._watch_scalers()
        if self._asked.isdigit():
            _seed(int(self._asked) + find_rank())

    def start(self, recorder: Recorder) -> None:
        """Read losses from now on, the first backward pass's too."""
        if not self._asked:
            return
        self._recorder = recorder
        self._log = Log(recorder.folder / "losses.jsonl")
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
        if self._log is not None:
            self._log.close()
            self._log = None

    def fail(self, error: Exception) -> None:
        """Switch off because a hook failed."""
        if self._recorder is not None:
            self._recorder.drop(self, error)

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if lines and self._log is not None:
            self._log.write("".join(lines))

    def _watch_scalers(self) -> None:
        """Remember of what a gradient scaler's product was made, which is the loss."""
        import torch
        from torch.amp.grad_scaler import GradScaler

        scale = GradScaler.scale
        is_traced = getattr(torch.compiler, "is_dynamo_compiling", torch.compiler.is_compiling)
        is_captured = capture_test()

        @functools.wraps(scale)
        def watched(scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return scale(scaler, outputs, *args, **kwargs)
            with passing:
                found = scale(scaler, outputs, *args, **kwargs)
            if isinstance(outputs, torch.Tensor) and found is not outputs and not is_captured():
                self._scaled = weakref.ref(found), outputs.detach()
            return found

        put(GradScaler, "scale", hidden(watched))


def _seed(number: int) -> None:
    """Seed what draws random numbers; torch has imported numpy where there is one."""
    import torch

    number %= 2**32
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
