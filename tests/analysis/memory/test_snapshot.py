"""The replay of a snapshot: who held how much when, of whole and of cut histories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory import snapshot
from dlprof.analysis.memory.snapshot import BEFORE, OTHERS, shortened
from dlprof.errors import NotMeasured
from tests.fixtures import dumps, traces
from tests.fixtures.dumps import MB, STEP, write
from tests.fixtures.places import SNAPSHOT
from tests.fixtures.runs import measured


def of(path: Path, held: Any, name: str) -> Any:
    measure = getattr(snapshot, name)
    return measured(write(path / "s.pickle", held), measure).frame(measure)


def at_peak(path: Path, held: Any) -> dict[str, float]:
    frame = of(path, held, "memory_holders")
    return dict(zip(frame["site"], frame["bytes"], strict=True))


def test_the_peak_and_who_holds_it(tmp_path: Path) -> None:
    held = dumps.training().snapshot()
    (peak,) = of(tmp_path, held, "memory_peak").to_dict("records")
    assert (peak["peak_bytes"], peak["reserved_bytes"], peak["end_bytes"]) == (24 * MB, 40 * MB, 10 * MB)
    assert at_peak(tmp_path, held) == {
        "forward (model.py:10)": 18 * MB,
        "backward of MulBackward0": 4 * MB,
        "step (optimizer.py:7)": 2 * MB,
    }
    frame = of(tmp_path, held, "memory_holders")
    assert frame["share"].sum() == pytest.approx(1)
    assert frame["blocks"].tolist() == [2, 1, 1]
    assert frame["via"].tolist()[0] == "forward (linear.py:125)"


def test_the_peak_is_the_first_of_equal_ones_and_sizes_are_rounded(tmp_path: Path) -> None:
    made = dumps.Allocator()
    first = made.segment()
    made.free(made.alloc(first, 1000))
    made.free(made.alloc(first, 1024))
    (peak,) = of(tmp_path, made.snapshot(), "memory_peak").to_dict("records")
    assert (peak["peak_bytes"], peak["at_ns"]) == (1024, traces.BASE_NS + 100_000)


def test_what_was_there_before_the_ring_of_events_has_no_line_but_counts(tmp_path: Path) -> None:
    made = dumps.training()
    # The second step alone: its two allocations, and what frees them.
    held = made.snapshot(last=6)
    assert [e["action"] for e in held["device_traces"][0]][:2] == ["alloc", "alloc"]
    assert at_peak(tmp_path, held) == {
        "forward (model.py:10)": 18 * MB,  # 8 MB of them by the block that is still there
        "backward of MulBackward0": 4 * MB,
        "step (optimizer.py:7)": 2 * MB,
    }
    # Of what was freed within the ring, and allocated before it, nothing is known.
    held = made.snapshot(last=5)
    assert at_peak(tmp_path, held)[BEFORE] == 10 * MB


def test_segments_that_were_given_back_count_until_then(tmp_path: Path) -> None:
    made = dumps.Allocator()
    first = made.segment()
    second = made.segment()
    made.free(made.alloc(second, 10 * MB))
    del made.segments[second]
    made.note("segment_free", addr=second, size=20 * MB)
    made.alloc(first, 5 * MB)
    (peak,) = of(tmp_path, made.snapshot(), "memory_peak").to_dict("records")
    assert (peak["peak_bytes"], peak["reserved_bytes"]) == (10 * MB, 40 * MB)


def test_memory_that_another_stream_still_uses_is_held(tmp_path: Path) -> None:
    made = dumps.Allocator()
    first = made.segment()
    a = made.alloc(first, 10 * MB)
    made.note("free_requested", addr=a, size=10 * MB)
    made.alloc(first + 10 * MB, 10 * MB, STEP)
    made.note("free_completed", addr=a, size=10 * MB)
    del made.blocks[a]
    assert sum(at_peak(tmp_path, made.snapshot()).values()) == 20 * MB


def test_without_events_the_moment_of_the_snapshot_is_the_peak(tmp_path: Path) -> None:
    held = {**dumps.training().snapshot(), "device_traces": []}
    (peak,) = of(tmp_path, held, "memory_peak").to_dict("records")
    assert (peak["events"], peak["peak_bytes"], peak["reserved_bytes"]) == (0, 10 * MB, 40 * MB)
    assert at_peak(tmp_path, held) == {"forward (model.py:10)": 8 * MB, "step (optimizer.py:7)": 2 * MB}
    with pytest.raises(NotMeasured, match="_record_memory_history"):
        of(tmp_path, held, "memory_curve")


def test_the_curve_adds_up_to_what_is_held(tmp_path: Path) -> None:
    curve = of(tmp_path, dumps.training().snapshot(), "memory_curve")
    total = curve.groupby("moment")["bytes"].sum()
    assert total.max() == 24 * MB
    assert total.iloc[-1] == 10 * MB
    assert curve.loc[curve["bytes"].idxmax(), "site"] == "forward (model.py:10)"


def test_a_thinned_curve_keeps_its_peak_and_sums_up_small_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MOST_POINTS", 4)
    monkeypatch.setattr(snapshot, "MOST_DRAWN", 1)
    curve = of(tmp_path, dumps.training().snapshot(), "memory_curve")
    total = curve.groupby("moment")["bytes"].sum()
    assert len(total) == 4
    assert total.max() == 24 * MB
    assert set(curve["site"]) == {"forward (model.py:10)", OTHERS}


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    sites = ["f (/a/b/x.py:1)", "g (/a/c/x.py:2)", "h (/a/b/y.py:3)", "backward of N", "i (z.py:4)"]
    assert list(shortened(sites).values()) == [
        *("f (b/x.py:1)", "g (c/x.py:2)", "h (y.py:3)", "backward of N", "i (z.py:4)"),
    ]


@pytest.mark.skipif(not SNAPSHOT.is_file(), reason="needs ../shared/traces/memory")
def test_a_real_snapshot_ends_with_what_its_segments_say() -> None:
    (peak,) = measured(SNAPSHOT, snapshot.memory_peak).frame(snapshot.memory_peak).to_dict("records")
    assert peak["reserved_bytes"] == 786_432_000
    assert peak["end_bytes"] == 423_759_360  # allocated_size of its segments, added up
    assert peak["peak_bytes"] > peak["end_bytes"]
