"""Records what a pipeline stage does and when: forward and backward of each micro-batch within schedule.step().

torch's own ranges include the wait for the neighbouring stage, but the stage's methods that run one chunk do not. These
methods are wrapped once the script has imported torch.distributed.pipelining; dlprof never imports it itself.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from dlprof.record import guarded
from dlprof.record.attribution import passed, passing
from dlprof.record.device.gpu import Events
from dlprof.record.hooks import put
from dlprof.record.log import WRITE_EVERY_NS, Part
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

# Chunks are written for the first steps, and then for as many steps as keep the file below some 20 MB an hour: a line
# takes about 110 bytes. The duration of each schedule.step(), and how much of it was work, is always written.
_ROWS_AT_FIRST = 20_000
_ROWS_A_SECOND = 50

# The most calls that wait for their device times. If the device is further behind, the oldest calls get none.
_MAX_WAITING = 64

Chunk = tuple[int, int, str]  # stage, micro-batch, action


@dataclass(slots=True)
class _Call:
    """One schedule.step(). Times are perf_counter readings in ns or, if the stages are on a GPU, events on it."""

    began_ns: int
    detailed: bool
    begun: Any  # an event; None on the CPU
    ended: Any = None
    step: int = -1
    chunks: list[tuple[Chunk, Any, Any]] = field(default_factory=list)  # each with its begin and end

    def events(self) -> list[Any]:
        """Return all events of this call, the last one first: if it has completed, most likely all have."""
        return [self.ended, self.begun, *(event for _, begin, end in self.chunks for event in (begin, end))]

    def at(self, moment: Any) -> int:
        """Return a time in perf_counter ns. For an event it assumes that device and host began the call together."""
        return int(moment if self.begun is None else self.began_ns + round(self.begun.elapsed_time(moment) * 1e6))


class Pipeline:
    """Writes the log `chunks`: keys and units as in that table. A job without a pipeline has no such log."""

    name = "pipeline"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None  # None before the start and after the end
        self._thread = 0
        self._log: Part | None = None
        self._lines: list[str] = []
        self._written_ns = 0
        self._wrapped = False
        self._schedule: Any = None
        self._call: _Call | None = None
        self._rows = float(_ROWS_AT_FIRST)
        self._rows_ns = 0
        self._events: Events | None = None  # of the GPU that this rank's stages are on
        self._waiting: deque[_Call] = deque()

    def start(self, recorder: Recorder) -> None:
        """Record from the next schedule.step() on if the script has a pipeline: the first call also sets it up."""
        self._thread = get_ident()
        os.register_at_fork(after_in_child=self._disarm)
        self._recorder = recorder
        self._wrap()

    def step(self, done: Sequence[Step]) -> None:
        """Write the rows collected so far."""
        if not self._wrapped:
            self._wrap()
        now = done[-1].end_ns
        if (self._lines or self._waiting) and now - self._written_ns >= WRITE_EVERY_NS:
            self._written_ns = now
            self._write(len(self._waiting) - _MAX_WAITING)

    def stop(self) -> None:
        """Write the rest. Device times that are unknown now stay unknown."""
        try:
            self._write(0)
        finally:
            self._disarm()

    def _disarm(self) -> None:
        """Stop recording: the wrappers only pass calls on. A forked child calls this too."""
        self._recorder = self._call = None
        self._lines.clear()
        self._waiting.clear()

    def fail(self, error: Exception) -> None:
        """Switch off because a hook failed."""
        if self._recorder is not None:
            self._recorder.drop(self, error)

    # -- wrappers

    def _wrap(self) -> None:
        schedules: Any = sys.modules.get("torch.distributed.pipelining.schedules")
        stages: Any = sys.modules.get("torch.distributed.pipelining.stage")
        # While a module is being imported, its last class is missing.
        if not hasattr(schedules, "PipelineScheduleMulti") or not hasattr(stages, "PipelineStage"):
            return
        self._wrapped = True
        for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
            put(schedule, "step", self._around_step(schedule.step))
        base, stage = schedules._PipelineSchedule, stages._PipelineStageBase
        chunks: dict[tuple[Any, str], Callable[..., Chunk | None]] = {
            (base, "_maybe_compute_loss"): _loss,
            (stage, "forward_one_chunk"): functools.partial(_chunk, "forward"),
            (stage, "backward_one_chunk"): _backward,
            (stage, "backward_weight_one_chunk"): functools.partial(_chunk, "weight"),
        }
        if hasattr(stage, "perform_reduce_grad"):
            chunks[stage, "perform_reduce_grad"] = lambda stage, *_, **__: (stage.stage_index, -1, "reduce")
        for (owner, name), chunk_of in chunks.items():
            put(owner, name, self._around_chunk(getattr(owner, name), chunk_of))

    def _around_step(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._begin(schedule):
                with passing:
                    return original(schedule, *args, **kwargs)
            try:
                result = original(schedule, *args, **kwargs)
            except BaseException as e:
                self._call = None  # half a step is not recorded
                passed(e)
                raise
            self._end()
            return result

        return step

    def _around_chunk(self, original: Callable[..., Any], chunk_of: Callable[..., Chunk | None]) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is None or get_ident() != self._thread:
                with passing:
                    return original(*args, **kwargs)
            try:
                chunk = chunk_of(*args, **kwargs)
                began = self._now() if chunk is not None else None
            except Exception as e:  # noqa: BLE001 - an unknown kind of stage; the script goes on
                self.fail(e)
                chunk = None
            if chunk is None:
                with passing:
                    return original(*args, **kwargs)
            try:
                with passing:
                    return original(*args, **kwargs)
            finally:
                try:
                    call.chunks.append((chunk, began, self._now()))
                except Exception as e:  # noqa: BLE001 - the script goes on
                    self.fail(e)

        return run

    # -- measuring

    @guarded
    def _begin(self, schedule: Any) -> bool:
        """Begin to measure a schedule's step; return whether it is measured."""
        recorder = self._recorder
        if recorder is None or self._call is not None or get_ident() != self._thread:
            return False  # a call within another is the schedule's own eval()
        if not schedule._has_backward or recorder.clock.capturing or recorder.device.capturing():
            return False  # an evaluation, or work that is captured into a CUDA graph and runs later
        if schedule is not self._schedule:
            self._see(schedule, recorder)
        now = time.perf_counter_ns()
        self._rows = min(_ROWS_AT_FIRST, self._rows + (now - self._rows_ns) * _ROWS_A_SECOND / 1e9)
        self._rows_ns = now
        if self._events is not None and self._rows <= 0:
            return False  # only whole steps have device times
        self._call = _Call(now, self._rows > 0, self._events.record() if self._events is not None else None)
        return True

    @guarded
    def _end(self) -> None:
        recorder, call, self._call = self._recorder, self._call, None
        if recorder is None or call is None:
            return
        call.step = recorder.clock.row.number
        if call.detailed:
            self._rows -= len(call.chunks)
        call.ended = self._now()
        if self._events is None:
            self._add(recorder, call)
        # A call has no times if the stream was captured when one of its chunks began or ended.
        elif all(event is not None for event in call.events()):
            self._waiting.append(call)

    def _see(self, schedule: Any, recorder: Recorder) -> None:
        """Keep which schedule runs, and over which stages."""
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        distributed: Any = sys.modules["torch.distributed"]
        group = stages[0].group if stages[0].group is not None else distributed.group.WORLD
        recorder.observed.pipeline = {
            "schedule": type(schedule).__name__,
            "microbatches": schedule._n_microbatches,
            "stages": sorted(stage.stage_index for stage in stages),
            "num_stages": stages[0].num_stages,
            "ranks": list(distributed.get_process_group_ranks(group)),
        }
        recorder.observed.news = True
        self._schedule = schedule
        device = stages[0].device
        if device.type == "cuda":
            index = device.index if device.index is not None else recorder.device.in_use()
            if index is not None and (self._events is None or self._events.index != index):
                self._events = Events(index)
                self._waiting.clear()  # their events are on another device
        if self._log is None:
            self._log = recorder.log("chunks")

    def _now(self) -> Any:
        """Return the host's time, or record an event on the device; None while a graph is captured."""
        return time.perf_counter_ns() if self._events is None else self._events.record()

    # -- writing

    def _add(self, recorder: Recorder, call: _Call) -> None:
        busy = 0
        lines = []
        for (stage, microbatch, action), begin, end in call.chunks:
            start = call.at(begin)
            dur = call.at(end) - start
            busy += dur
            if call.detailed:
                lines.append(
                    f'{{"step":{call.step},"action":"{action}","stage":{stage},"microbatch":{microbatch},'
                    f'"start_ns":{recorder.unix(start)},"dur_ns":{dur}}}\n'
                )
        self._lines.append(
            f'{{"step":{call.step},"action":"schedule","start_ns":{recorder.unix(call.began_ns)},'
            f'"dur_ns":{call.at(call.ended) - call.began_ns},"busy_ns":{busy}}}\n'
        )
        self._lines += lines

    def _write(self, overdue: int) -> None:
        """Write the calls that the device is through with, in their order; the first `overdue` are given up."""
        while self._waiting and self._recorder is not None and self._events is not None:
            call = self._waiting[0]
            known = all(event.query() for event in call.events())
            if not known and overdue <= 0:
                break
            overdue -= 1
            self._waiting.popleft()
            if known:
                self._add(self._recorder, call)
                self._events.release(*call.events())
        lines, self._lines = self._lines, []
        if lines and self._log is not None:
            self._log.write("".join(lines))


def _chunk(action: str, stage: Any, *args: Any, fwd_chunk_id: int = -1, bwd_chunk_id: int = -1, **_: Any) -> Chunk:
    """Return what a call of a stage's method works on, by its arguments."""
    return stage.stage_index, int(args[0]) if args else max(fwd_chunk_id, bwd_chunk_id), action


def _backward(stage: Any, *args: Any, full_backward: bool = True, **more: Any) -> Chunk:
    """Tell a whole backward pass from one for the inputs alone."""
    whole = args[2] if len(args) > 2 else full_backward
    return _chunk("backward" if whole else "input", stage, *args, **more)


def _loss(_schedule: Any, stage: Any, _output: Any, _targets: Any, index: int, *_: Any, **__: Any) -> Chunk | None:
    """Return the chunk of a loss; None: this stage is not the last, and has none."""
    return (stage.stage_index, index, "loss") if getattr(stage, "is_last", False) else None
