"""How free memory lies, at the end and when a request failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.memory.memory import gaps, memory_state
from tests.fixtures import dumps
from tests.fixtures.dumps import MB, write
from tests.fixtures.places import SNAPSHOT
from tests.fixtures.runs import measured

COLUMNS = ["allocated_bytes", "reserved_bytes", "free_bytes", "split_bytes", "largest_bytes"]


def state(path: Path, held: Any) -> Any:
    frame = measured(write(path / "s.pickle", held), memory_state).frame(memory_state)
    return frame.set_index("moment")


def test_free_pieces_of_the_end(tmp_path: Path) -> None:
    frame = state(tmp_path, dumps.training().snapshot())
    # 12 MB behind the parameters; before and behind the optimizer's 2 MB, 10 and 8 MB.
    assert frame.loc["end", COLUMNS].tolist() == [10 * MB, 40 * MB, 30 * MB, 30 * MB, 12 * MB]
    assert "oom" not in frame.index


def test_a_segment_that_is_free_as_a_whole_is_not_in_pieces(tmp_path: Path) -> None:
    made = dumps.Allocator()
    made.segment()
    made.alloc(made.segment(), 5 * MB)
    assert state(tmp_path, made.snapshot()).loc["end", COLUMNS].tolist() == [5 * MB, 40 * MB, 35 * MB, 15 * MB, 20 * MB]


def test_free_pieces_when_a_request_failed_and_after_that(tmp_path: Path) -> None:
    made = dumps.ran_out(pieces=True)
    for address in list(made.blocks):  # what unwinding frees before the snapshot
        made.free(address)
    frame = state(tmp_path, made.snapshot())
    assert frame.loc["oom", COLUMNS].tolist() == [20 * MB, 40 * MB, 20 * MB, 20 * MB, 10 * MB]
    assert frame.loc["oom", ["requested_bytes", "device_free_bytes", "ooms"]].tolist() == [15 * MB, 1 * MB, 1]
    assert frame.loc["oom", "site"] == "forward (model.py:10)"
    assert frame.loc["end", COLUMNS].tolist() == [0, 40 * MB, 40 * MB, 0, 20 * MB]


def test_a_free_piece_of_another_stream_serves_nobody(tmp_path: Path) -> None:
    made = dumps.ran_out(pieces=True)
    made.events[-1]["stream"] = 7
    assert state(tmp_path, made.snapshot()).loc["oom", "largest_bytes"] == 0


def test_segments_that_grow_are_not_followed(tmp_path: Path) -> None:
    made = dumps.ran_out(pieces=True)
    for event in made.events:
        event["action"] = event["action"].replace("segment_alloc", "segment_map")
    made.note("segment_unmap", addr=dumps.BASE, size=1)
    frame = state(tmp_path, made.snapshot())
    assert frame.loc["oom", ["split_bytes", "largest_bytes"]].isna().all()


def test_gaps_are_what_lies_between_blocks() -> None:
    segments, sizes = np.array([1000, 100, 5000]), np.array([50, 100, 10])
    size, segment, whole = gaps(segments, sizes, np.array([120, 150, 1000]), np.array([10, 50, 50]))
    assert list(zip(size.tolist(), segment.tolist(), whole.tolist(), strict=True)) == [
        (20, 0, False),
        (20, 0, False),
        (10, 2, True),
    ]


@pytest.mark.skipif(not SNAPSHOT.is_file(), reason="needs ../shared/traces/memory")
def test_a_real_snapshot() -> None:
    (row,) = measured(SNAPSHOT, memory_state).frame(memory_state).to_dict("records")
    assert (row["allocated_bytes"], row["reserved_bytes"]) == (423_759_360, 786_432_000)
    assert 0 < row["split_bytes"] < row["free_bytes"] == 786_432_000 - 423_759_360
