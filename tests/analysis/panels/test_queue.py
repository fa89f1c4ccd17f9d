"""The queue of a device, drawn over the traced steps, and what waits in it while the device idles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlprof.analysis.panels.host import QUEUE_PICTURE
from dlprof.result import Panel
from tests.fixtures import runs
from tests.fixtures.hosts import ahead, call, waiting


def drawn(folder: Path, *made: dict[str, Any]) -> list[Panel]:
    return runs.called(runs.foreign(folder, *made), QUEUE_PICTURE.draw)


def test_what_waits_longest_stands_with_its_cause_and_the_queue_is_drawn(tmp_path: Path) -> None:
    waits, length = drawn(tmp_path, waiting(call("cudaStreamWaitEvent")))
    assert waits.title == "Queued work that waits, a traced step of rank 0"
    ((ended, _, launched, times, idle, before, what),) = waits.rows
    assert (ended, launched, times, idle) == ("second", "cudaLaunchKernel", 1, 500_000)
    assert before == 752_000  # from its launch until it runs
    assert "event" in what
    assert (length.shape, length.columns) == ("lines", ("ns", "rank 0"))


def test_ranks_are_drawn_on_one_time_and_short_waits_leave_no_table(tmp_path: Path) -> None:
    other = waiting(wait=1_000)
    other["distributedInfo"] |= {"rank": 1, "world_size": 2}
    (length,) = drawn(tmp_path, ahead(), other)
    assert length.columns == ("ns", "rank 0", "rank 1")
    assert "behind its host" in length.note
    assert max(float(str(row[1])) for row in length.rows if row[1] not in (None, "")) <= 8


def test_without_links_there_is_no_picture(tmp_path: Path) -> None:
    made = waiting()
    for event in made["traceEvents"]:
        event["args"].pop("correlation", None)
    assert drawn(tmp_path, made) == []
