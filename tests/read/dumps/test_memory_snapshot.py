"""Snapshots of any version become the same tables; broken and hostile ones are one line."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.read.dumps import memory_snapshot
from dlprof.read.formats import Head, recognised
from tests.fixtures import dumps, traces
from tests.fixtures.dumps import MB, write
from tests.fixtures.places import SNAPSHOT


def read(path: Path, held: Any) -> Any:
    return memory_snapshot.read(write(path / "s.pickle", held))


def test_events_and_blocks_become_tables(tmp_path: Path) -> None:
    reading = read(tmp_path, dumps.training().snapshot())
    events, blocks = reading.tables["memory_events"], reading.tables["memory_blocks"]
    assert events["action"].value_counts().to_dict() == {
        "alloc": 6,
        "free_completed": 4,
        "free_requested": 4,
        "segment_alloc": 2,
    }
    first = events[events["action"] == "alloc"].iloc[0]
    assert (first["bytes"], first["site"]) == (8 * MB, "forward (/home/me/job/model.py:10)")
    assert events["at_ns"].iloc[:2].tolist() == [traces.BASE_NS, traces.BASE_NS + 100_000]
    assert blocks["state"].value_counts().to_dict() == {"inactive": 3, "active_allocated": 2}
    assert blocks["bytes"].sum() == 40 * MB
    assert reading.facts == {"allocator": {"conf": "", "expandable": False}}
    assert (reading.warnings, dict(reading.lacks)) == ((), {})


def test_versions_without_times_and_without_addresses(tmp_path: Path) -> None:
    new = read(tmp_path, dumps.training().snapshot()).tables
    old = read(tmp_path, dumps.training(timed=False, addressed=False).snapshot()).tables
    assert (old["memory_events"]["at_ns"] == -1).all()
    assert old["memory_blocks"].equals(new["memory_blocks"])


def test_segments_alone_say_what_would_bring_events(tmp_path: Path) -> None:
    made = dumps.training().snapshot()
    for held in (made["segments"], {**made, "device_traces": [[]]}):
        reading = read(tmp_path, held)
        assert list(reading.tables) == ["memory_blocks"]
        assert "_record_memory_history" in reading.lacks["memory_events"]


def test_a_snapshot_is_known_by_its_content_and_its_rank_by_its_name(tmp_path: Path) -> None:
    made = dumps.training().snapshot()
    for name, held in (("rank3_memory", made), ("any", made["segments"])):
        known = recognised(Head(write(tmp_path / name, held)))
        assert known is not None
        assert known[0] is memory_snapshot.FORMAT
        assert known[1][0].rank == (3 if name.startswith("rank") else None)
    assert recognised(Head(write(tmp_path / "other", {"weights": [1, 2]}))) is None


def test_a_cut_snapshot_gives_what_comes_before(tmp_path: Path) -> None:
    data = pickle.dumps(dumps.training().snapshot())
    (tmp_path / "cut").write_bytes(data[: int(len(data) * 0.8)])
    reading = memory_snapshot.read(tmp_path / "cut")
    assert len(reading.tables["memory_blocks"]) == 5
    assert 3 < len(reading.tables["memory_events"]) < 16
    assert "its end is missing" in reading.warnings[0]


class Hostile:
    """Runs a command where it is read by Python."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("held", [{"weights": 1}, [], {"segments": []}, {"segments": [Hostile()]}, 5, "x"])
def test_another_pickle_is_one_line(tmp_path: Path, held: Any) -> None:
    with pytest.raises(DlprofError) as raised:
        read(tmp_path, held)
    assert "\n" not in str(raised.value)
    assert "s.pickle" in str(raised.value)


def test_values_of_other_types_are_passed_over(tmp_path: Path) -> None:
    odd = [
        None,
        3,
        {"action": "alloc", "addr": "x", "size": 2**62 + 1, "frames": 7},
        {"action": ["x"]},
        {"action": "new"},
    ]
    blocks = [None, {"size": "x"}, {"size": 512, "state": 4, "frames": "y"}]
    held = {"segments": [None, {"blocks": 3}, {"total_size": 512, "blocks": blocks}], "device_traces": [None, odd]}
    tables = read(tmp_path, held).tables
    assert len(tables["memory_blocks"]) == 1
    assert tables["memory_events"][["device", "address", "bytes"]].to_numpy().tolist() == [[1, -1, 0]]


@pytest.mark.skipif(not SNAPSHOT.is_file(), reason="needs ../shared/traces/memory")
def test_a_real_snapshot() -> None:
    reading = memory_snapshot.read(SNAPSHOT)
    assert len(reading.tables["memory_events"]) == 11_300
    assert len(reading.tables["memory_blocks"]) == 213
    assert reading.warnings == ()
