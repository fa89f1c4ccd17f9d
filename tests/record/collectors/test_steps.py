"""The lines of steps: one each, one for many short ones, and those that are saved before their device is through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.record.collectors.steps import Steps
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step
from dlprof.schema import STEPS
from tests.fixtures.jobs import rows

pytest.importorskip("torch", reason="recording needs torch")

MS = 1_000_000


class Device:
    """Stands for a DeviceClock: of each span it knows the time once the test says so."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def measure(self, span: str) -> int | None:
        return self.known.get(span)


class Job:
    """A collector of steps whose device the test holds back."""

    def __init__(self, folder: Path) -> None:
        self.recorder = Recorder(folder, [])
        self.steps = Steps()
        self.steps.start(self.recorder)
        self.device = Device()
        self.steps._device = self.device  # type: ignore[assignment]

    def rows(self) -> list[dict[str, Any]]:
        return rows(self.recorder.folder)


def step(number: int, ms: int = 1000, *, train: bool = True, device: object = None, lead: int = -1) -> Step:
    """Return a step; each starts a second after the one before."""
    worked = int(train)
    return Step(
        number, number * 1000 * MS, ms * MS, lead, 1, 2, 3 * worked, 4 * worked, 1, 1, worked, worked, 0, 0, device
    )


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_line_has_the_tables_columns_and_unix_times(job: Job) -> None:
    job.steps.step([step(0, lead=5), step(1, train=False)])
    job.steps.stop()
    first, second = job.rows()
    assert list(first) == list(STEPS)
    assert first["start_ns"] == job.recorder.unix(0)
    assert second["start_ns"] - first["start_ns"] == 1000 * MS
    assert (first["kind"], first["lead_ns"], first["device_step_ns"], first["backward_ns"]) == ("train", 5, -1, 3)
    assert (second["kind"], second["optimizer_steps"]) == ("validation", 0)


def test_lines_are_written_a_few_times_a_second(job: Job) -> None:
    on_disk = []
    for number, (start, ms) in enumerate(((0, 300), (300, 100), (400, 160), (560, 10))):
        job.steps.step([step(number, ms)._replace(start_ns=start * MS)])
        on_disk.append([row["step"] for row in job.rows()])
    assert on_disk == [[0], [0], [0, 1, 2], [0, 1, 2]]
    job.steps.stop()
    assert [row["step"] for row in job.rows()] == [0, 1, 2, 3]


def test_after_so_many_steps_short_ones_that_are_alike_share_a_line(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlprof.record.collectors.steps._EACH_STEPS", 2)
    kinds = [True] * 2 + [True] * 3 + [False] * 2 + [True]
    job.steps.step([step(n, 10, train=train) for n, train in enumerate(kinds)])
    job.steps.step([step(8, 40), step(9, 10)])  # a long one keeps its own
    job.steps.stop()
    shared = [(row["step"], row.get("steps", 1), row["dur_ns"] // MS) for row in job.rows()]
    assert shared == [(0, 1, 10), (1, 1, 10), (2, 3, 30), (5, 2, 20), (7, 1, 10), (8, 1, 40), (9, 1, 10)]
    third = job.rows()[2]
    assert (third["optimizer_steps"], third["backward_ns"], third["device_step_ns"]) == (3, 9, -1)


def test_a_shared_line_is_full_after_so_much_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlprof.record.collectors.steps._EACH_STEPS", 0)
    job.device.known = {"a": 4}
    job.steps.step([step(n, 15, device="a") for n in range(7)])
    job.steps.stop()
    lines = [(row["step"], row.get("steps", 1), row["device_step_ns"]) for row in job.rows()]
    assert lines == [(0, 3, 12), (3, 3, 12), (6, 1, 4)]


@pytest.mark.slow
def test_a_million_fast_steps_are_a_bounded_log(job: Job) -> None:
    """Steps of 0.4 ms, of which 100 share a line; nothing of them stays in memory."""
    n, us = 1_000_000, 400
    one = step(0)._replace(dur_ns=us * 1000)
    for first in range(0, n, 2_500):  # what a second has
        job.steps.step([one._replace(number=k, start_ns=k * us * 1000) for k in range(first, first + 2_500)])
        assert len(job.steps._lines) < 12_500
        assert len(job.steps._shared) <= 100
    job.steps.stop()
    lines = job.rows()
    assert sum(row.get("steps", 1) for row in lines) == n
    assert len(lines) == 10_000 + (n - 10_000) / 100
    assert (job.recorder.folder / "records.jsonl").stat().st_size < 10_000_000


def test_steps_wait_for_their_device_in_order(job: Job) -> None:
    job.steps.step([step(0, device="a"), step(1, device="b"), step(2)])
    assert job.rows() == []
    job.device.known = {"b": 8}
    job.steps.step([step(3, device="c")])
    assert job.rows() == []
    job.device.known = {"a": 7, "b": 8}
    job.steps.step([step(4, device="d")])
    assert [(row["step"], row["device_step_ns"]) for row in job.rows()] == [(0, 7), (1, 8), (2, -1)]
    job.steps.stop()
    assert [(row["step"], row["device_step_ns"]) for row in job.rows()[3:]] == [(3, -1), (4, -1)]


def test_a_device_that_is_too_far_behind_loses_its_time_and_not_the_step(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlprof.record.collectors.steps._MAX_WAITING", 2)
    job.steps.step([step(n, device=f"{n}") for n in range(5)])
    assert [(row["step"], row["device_step_ns"]) for row in job.rows()] == [(0, -1), (1, -1), (2, -1)]


def test_what_is_saved_meanwhile_is_marked_until_its_device_is_through_and_no_step_is_taken_twice(job: Job) -> None:
    done = [step(0, device="a"), step(1, device="b")]
    job.steps.save(done[:1])
    job.steps.save(done)
    job.steps.save(done)
    assert [(row["step"], row.get("outstanding", 0)) for row in job.rows()] == [(0, 1), (1, 1)]
    job.device.known = {"a": 7, "b": 8}
    job.steps.step(done)
    job.steps.stop()
    later = [(row["step"], row.get("outstanding", 0), row["device_step_ns"]) for row in job.rows()[2:]]
    assert later == [(0, 0, 7), (1, 0, 8)]
