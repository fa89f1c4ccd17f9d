"""When nsys' window is opened and closed, by a recorder and a CUDA that only count."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.collectors.capture import Capture

torch = pytest.importorskip("torch", reason="recording needs torch")


class Job:
    """Steps of 10 ms, or of another length."""

    due: int | None = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, asked: str, step_ns: int = 10_000_000) -> None:
        monkeypatch.setenv("DLPROF_CAPTURE", asked)
        self.called: list[tuple[str, int]] = []
        self.cuda = True
        self.step_ns, self.now = step_ns, 0
        self.row = SimpleNamespace(number=0, profiled=0)
        self.clock: Any = SimpleNamespace(row=self.row, trains=True, capturing=False)
        device = SimpleNamespace(index=0, capturing=lambda: False)
        self.recorder: Any = SimpleNamespace(clock=self.clock, device=device, window={})
        for what in ("start", "stop"):
            note = partial(lambda what: self.called.append((what, self.row.number)), what)
            monkeypatch.setattr(torch.cuda.profiler, what, note)
        for what in ("is_available", "is_initialized"):
            monkeypatch.setattr(torch.cuda, what, lambda: self.cuda)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda index: self.called.append(("synchronize", index)))
        self.capture = Capture()
        recorder: Any = self.recorder
        self.capture.start(recorder)
        self.profiled: list[int] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            done: Any = SimpleNamespace(number=self.row.number, start_ns=self.now, dur_ns=self.step_ns)
            self.now += self.step_ns
            if self.row.profiled:
                self.profiled.append(self.row.number)
            self.row.number, self.row.profiled = self.row.number + 1, 0
            self.clock.position = self.row.number
            if self.due is not None and self.row.number >= self.due:
                self.due = self.capture.step([done])

    def window(self, only: str = "") -> list[Any]:
        """Return where nsys was started and stopped, or all calls in their order."""
        return (
            [at for what, at in self.called if what != "synchronize"]
            if only == "steps"
            else [w for w, _ in self.called]
        )


ONCE = ["synchronize", "start", "synchronize", "stop"]


def test_the_window_is_that_which_was_asked_for_after_a_step_that_is_not_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, "6,2,3")
    job.steps(30)
    # Steps 8, 9 and 10 are recorded, and step 7 is heard. Nothing is left in the queue where nsys starts and stops.
    assert job.called == [("synchronize", 0), ("start", 7), ("synchronize", 0), ("stop", 11)]
    assert job.recorder.window == {"first_step": 8, "last_step": 10}
    assert {7, 8, 9, 10} <= set(job.profiled)
    assert job.due is None


@pytest.mark.parametrize(("step_ns", "at"), [(2_000_000_000, [3, 6]), (10_000_000, [11, 17])])
def test_the_window_of_slow_steps_comes_sooner_and_is_shorter(
    step_ns: int, at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(monkeypatch, "on", step_ns)
    job.steps(30)
    assert job.window("steps") == at


def test_nothing_is_asked_of_a_device_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, "2,1,2")
    job.clock.capturing = True
    job.steps(6)
    assert not job.called
    job.clock.capturing = False
    job.steps(6)
    assert job.window() == ONCE


def test_a_job_that_ends_inside_the_window_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, "2,1,5")
    job.steps(5)
    job.capture.stop()
    job.capture.stop()
    assert (job.window(), job.recorder.window["last_step"]) == (ONCE, 4)


def test_without_a_gpu_or_without_being_asked_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, "1,1,1")
    job.cuda = False
    with pytest.raises(RuntimeError, match="uses no GPU"):  # which switches the collector off, and says so
        job.steps(5)
    job.capture.stop()
    assert not job.called
    job = Job(monkeypatch, "")
    job.steps(5)
    assert (job.due, job.called) == (None, [])
