"""What a pipeline stage works on, and when: each micro-batch's forward and backward, within schedule.step().

torch's own ranges contain the wait for the neighbour; the stage's methods that run one chunk do not. They are watched
once the script has imported torch.distributed.pipelining, which is never imported for our sake.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from dlprof.record.device.device import Events
from dlprof.record.hooks import put
from dlprof.record.log import WRITE_EVERY_NS, Log
from dlprof.record.recorder import Recorder
from dlprof.record.stepping import Step

_SCHEDULES = "torch.distributed.pipelining.schedules"
_STAGES = "torch.distributed.pipelining.stage"

# Chunks are written for the first steps and then for as many as keep the file below some 20 MB an hour: a line takes
# about 110 bytes. What a whole schedule.step() took, and how much of it was work, is written for every one.
_ROWS_AT_FIRST = 20_000
_ROWS_A_SECOND = 50

# Calls whose device times are outstanding; a device that is further behind than this loses those of the oldest.
_MAX_WAITING = 64


class _Call:
    """One schedule.step() being measured. Chunks: stage, micro-batch, action, and begin and end in ns, or as events."""

    __slots__ = ("began", "begun", "chunks", "detailed", "ended")

    def __init__(self, began: int, detailed: bool) -> None:
        self.began = began
        self.detailed = detailed
        self.chunks: list[tuple[int, int, str, Any, Any]] = []
        self.begun: Any = None  # events on the device's stream, where there is one
        self.ended: Any = None

    def events(self) -> list[Any]:
        """Return all events of this call, the last one first: when that is over, most often all are."""
        return [self.ended, self.begun, *(event for chunk in self.chunks for event in chunk[3:])]

    def at(self, event: Any) -> int:
        """Return when the device came to an event of this call, as if it had begun when its host did."""
        ns: int = round(self.begun.elapsed_time(event) * 1e6)
        return self.began + ns


class Pipeline:
    """Writes chunks.jsonl: keys and units as in the table `chunks`. Nothing of it exists in a job without pipeline."""

    name = "pipeline"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None  # None: not started, or no longer recording
        self._thread = 0
        self._log: Log | None = None
        self._lines: list[str] = []
        self._written_ns = 0
        self._watched = False
        self._schedule: Any = None
        self._call: _Call | None = None
        self._rows = float(_ROWS_AT_FIRST)
        self._rows_ns = 0
        self._events: Events | None = None  # of the GPU that this rank's stages are on
        self._waiting: deque[tuple[int, _Call]] = deque()

    def start(self, recorder: Recorder) -> None:
        """Watch from the next schedule.step() on, if the script has a pipeline: the first one also sets it up."""
        self._thread = get_ident()
        os.register_at_fork(after_in_child=self._disarm)
        self._recorder = recorder
        self._watch()

    def step(self, done: Sequence[Step]) -> None:
        """Write what has gathered."""
        if not self._watched:
            self._watch()
        now = done[-1].start_ns + done[-1].dur_ns
        if (self._lines or self._waiting) and now - self._written_ns >= WRITE_EVERY_NS:
            self._written_ns = now
            try:
                self._drain(len(self._waiting) - _MAX_WAITING)
                self._write()
            except Exception:
                self._disarm()
                raise

    def stop(self) -> None:
        """Write the rest; a device time that is not known by now never will be."""
        try:
            self._drain(0)
            self._write()
        finally:
            self._disarm()
            if self._log is not None:
                self._log.close()

    def _disarm(self) -> None:
        """Leave the process as if we were not there; the wrappers only pass on. Also what a fork's child does."""
        self._recorder = None
        self._call = None
        self._lines.clear()
        self._waiting.clear()

    def _fail(self, error: Exception) -> None:
        recorder = self._recorder
        self._disarm()
        if recorder is not None:
            recorder.warn(f"pipeline is off: {type(error).__name__}: {error}; the job goes on without it")

    # -- watching

    def _watch(self) -> None:
        schedules: Any = sys.modules.get(_SCHEDULES)
        stages: Any = sys.modules.get(_STAGES)
        # While a module is being imported its last class is not yet there.
        if not hasattr(schedules, "PipelineScheduleMulti") or not hasattr(stages, "PipelineStage"):
            return
        self._watched = True
        for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
            put(schedule, "step", self._around_step(schedule.step))
        base: Any = schedules._PipelineSchedule
        put(base, "_maybe_compute_loss", self._around_loss(base._maybe_compute_loss))
        stage: Any = stages._PipelineStageBase
        around = self._around_chunk
        put(stage, "forward_one_chunk", around(stage.forward_one_chunk, lambda *_, **__: "forward"))
        put(stage, "backward_one_chunk", around(stage.backward_one_chunk, _backward))
        put(stage, "backward_weight_one_chunk", around(stage.backward_weight_one_chunk, lambda *_, **__: "weight"))
        if hasattr(stage, "perform_reduce_grad"):
            put(stage, "perform_reduce_grad", around(stage.perform_reduce_grad, lambda *_, **__: "reduce"))

    def _around_step(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._begin(schedule):
                return original(schedule, *args, **kwargs)
            try:
                result = original(schedule, *args, **kwargs)
            except BaseException:
                self._call = None  # half a step tells nothing
                raise
            self._end()
            return result

        return step

    def _around_chunk(self, original: Callable[..., Any], action: Callable[..., str]) -> Any:
        @functools.wraps(original)
        def chunk(stage: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is None or get_ident() != self._thread:
                return original(stage, *args, **kwargs)
            began = self._now()
            try:
                return original(stage, *args, **kwargs)
            finally:
                ended = self._now()
                try:
                    what = action(*args, **kwargs)
                    which = _microbatch(*args, **kwargs) if what != "reduce" else -1
                    call.chunks.append((stage.stage_index, which, what, began, ended))
                except Exception as e:  # noqa: BLE001 - a stage of another make; the script goes on
                    self._fail(e)

        return chunk

    def _around_loss(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def loss(schedule: Any, stage: Any, output: Any, targets: Any, index: int, *args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is None or not getattr(stage, "is_last", False) or get_ident() != self._thread:
                return original(schedule, stage, output, targets, index, *args, **kwargs)
            began = self._now()
            try:
                return original(schedule, stage, output, targets, index, *args, **kwargs)
            finally:
                ended = self._now()
                try:
                    call.chunks.append((stage.stage_index, index, "loss", began, ended))
                except Exception as e:  # noqa: BLE001 - a stage of another make; the script goes on
                    self._fail(e)

        return loss

    # -- measuring

    def _begin(self, schedule: Any) -> bool:
        """Begin to measure a schedule's step; False: nothing is measured of it."""
        recorder = self._recorder
        if recorder is None or self._call is not None or get_ident() != self._thread:
            return False  # one within another is its own eval()
        try:
            if not schedule._has_backward or recorder.clock.capturing or recorder.device.capturing():
                return False  # it evaluates, or what it does is captured into a CUDA graph and runs later
            if schedule is not self._schedule:
                self._see(schedule, recorder)
            now = time.perf_counter_ns()
            self._rows = min(_ROWS_AT_FIRST, self._rows + (now - self._rows_ns) * _ROWS_A_SECOND / 1e9)
            self._rows_ns = now
            call = _Call(now, self._rows > 0)
            if self._events is not None:
                if not call.detailed:
                    return False  # only whole steps have device times
                call.begun = self._events.record()
            self._call = call
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)
            return False
        return True

    def _end(self) -> None:
        recorder, call = self._recorder, self._call
        self._call = None
        if recorder is None or call is None:
            return
        try:
            if call.detailed:
                self._rows -= len(call.chunks)
            if self._events is not None:
                call.ended = self._events.record()
                # A call in which the stream was captured at some chunk's begin or end has no times.
                if all(event is not None for event in call.events()):
                    self._waiting.append((recorder.clock.row.number, call))
            else:
                self._add(recorder, recorder.clock.row.number, call, time.perf_counter_ns() - call.began, call.chunks)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)

    def _see(self, schedule: Any, recorder: Recorder) -> None:
        """Remember which schedule runs, over which stages."""
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
                self._waiting.clear()  # of another device, whose events are none of these
        if self._log is None:
            self._log = Log(recorder.folder / "chunks.jsonl")

    def _now(self) -> Any:
        """Return the time on the host, or an event that the device will reach."""
        if self._events is None:
            return time.perf_counter_ns()
        try:
            return self._events.record()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)
            return None

    def _drain(self, overdue: int) -> None:
        """Move on the calls that the device is through with, in their order; the first `overdue` are given up."""
        recorder = self._recorder
        while self._waiting and recorder is not None:
            number, call = self._waiting[0]
            known = all(event.query() for event in call.events())
            if not known and overdue <= 0:
                return
            overdue -= 1
            self._waiting.popleft()
            if known:
                chunks = [(*what, call.at(begin), call.at(end)) for *what, begin, end in call.chunks]
                self._add(recorder, number, call, call.at(call.ended) - call.began, chunks)
                if self._events is not None:
                    self._events.release(*call.events())

    # -- writing

    def _add(self, recorder: Recorder, number: int, call: _Call, dur: int, chunks: list[Any]) -> None:
        busy = sum(end - begin for *_, begin, end in chunks)
        self._lines.append(
            f'{{"step":{number},"action":"schedule","start_ns":{recorder.unix(call.began)},"dur_ns":{dur},'
            f'"busy_ns":{busy}}}\n'
        )
        if call.detailed:
            self._lines += [
                f'{{"step":{number},"action":"{what}","stage":{stage},"microbatch":{which},'
                f'"start_ns":{recorder.unix(begin)},"dur_ns":{end - begin}}}\n'
                for stage, which, what, begin, end in chunks
            ]

    def _write(self) -> None:
        if self._lines and self._log is not None:
            lines = "".join(self._lines)
            self._lines.clear()
            self._log.write(lines)


def _backward(*args: Any, full_backward: bool = True, **_: Any) -> str:
    """Tell a whole backward pass from one for the inputs alone, by the arguments of backward_one_chunk."""
    return "backward" if (args[2] if len(args) > 2 else full_backward) else "input"


def _microbatch(*args: Any, fwd_chunk_id: int = -1, bwd_chunk_id: int = -1, **_: Any) -> int:
    """Find the micro-batch's number among the arguments of a stage's method."""
    return int(args[0]) if args else max(fwd_chunk_id, bwd_chunk_id)
