"""Snapshots of the allocator and ranks that ran out of memory: who held what, how free memory lay, what would fit."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.memory import snapshot
from dlprof.analysis.memory.failures import ERROR, KERNEL, KILLED, cures, memory_failures, named
from dlprof.analysis.memory.rules import out_of_memory
from dlprof.analysis.memory.snapshot import BEFORE, OTHERS, gaps, memory_state, shortened
from dlprof.errors import NotMeasured
from tests.fixtures import allocator, dumps, runs, traces
from tests.fixtures.allocator import GB, GPU
from tests.fixtures.asking import ask
from tests.fixtures.dumps import MB, STEP, Allocator, write
from tests.fixtures.places import SNAPSHOT
from tests.fixtures.runs import MS, measured
from tests.fixtures.traces import BASE_NS

FORWARD, OPTIMIZER, BACKWARD = "forward (model.py:10)", "step (optimizer.py:7)", "backward of MulBackward0"
REAL = pytest.mark.skipif(not SNAPSHOT.is_file(), reason="needs ../shared/traces/memory")


def of(path: Path, held: Any, name: str) -> Any:
    measure = getattr(snapshot, name)
    return measured(write(path / "s.pickle", held), measure).frame(measure)


def at_peak(path: Path, held: Any) -> dict[str, float]:
    frame = of(path, held, "memory_holders")
    return dict(zip(frame["site"], frame["bytes"] / MB, strict=True))


def test_the_peak_and_who_holds_it(tmp_path: Path) -> None:
    held = dumps.training().snapshot()
    frame = of(tmp_path, held, "memory_holders")
    assert dict(zip(frame["site"], frame["bytes"], strict=True)) == {
        FORWARD: 18 * MB,
        BACKWARD: 4 * MB,
        OPTIMIZER: 2 * MB,
    }
    assert frame["share"].sum() == pytest.approx(1)
    assert frame["blocks"].tolist() == [2, 1, 1]
    assert frame["via"].tolist()[0] == "forward (linear.py:125)"


def equal_peaks() -> Allocator:
    made = Allocator()
    first = made.segment()
    made.free(made.alloc(first, 1000))  # rounded to 1024
    made.free(made.alloc(first, 1024))
    return made


def given_back() -> Allocator:
    """Free a segment, which counts until then."""
    made = Allocator()
    first, second = made.segment(), made.segment()
    made.free(made.alloc(second, 10 * MB))
    del made.segments[second]
    made.note("segment_free", addr=second, size=20 * MB)
    made.alloc(first, 5 * MB)
    return made


def of_another_stream() -> Allocator:
    """Free what another stream still uses, which is held until then."""
    made = Allocator()
    first = made.segment()
    a = made.alloc(first, 10 * MB)
    made.note("free_requested", addr=a, size=10 * MB)
    made.alloc(first + 10 * MB, 10 * MB, STEP)
    made.note("free_completed", addr=a, size=10 * MB)
    del made.blocks[a]
    return made


# Events → the peak, what is reserved, what is held at the end, bytes, and when the peak is, events after the first.
PEAKS: dict[str, tuple[Allocator, float, float, float, int]] = {
    "two steps": (dumps.training(), 24 * MB, 40 * MB, 10 * MB, 11),
    "the first of equal ones": (equal_peaks(), 1024, 20 * MB, 0, 1),
    "a segment that was given back": (given_back(), 10 * MB, 40 * MB, 5 * MB, 2),
    "memory of another stream": (of_another_stream(), 20 * MB, 20 * MB, 10 * MB, 3),
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of(name: str, tmp_path: Path) -> None:
    made, *sizes, event = PEAKS[name]
    (peak,) = of(tmp_path, made.snapshot(), "memory_peak").to_dict("records")
    assert [peak[f"{column}_bytes"] for column in ("peak", "reserved", "end")] == sizes
    assert peak["at_ns"] == traces.BASE_NS + event * 100_000


def test_what_was_there_before_the_ring_of_events_has_no_line_but_counts(tmp_path: Path) -> None:
    made = dumps.training()
    # The second step alone: its two allocations, and what frees them. 8 MB by the block that is still there.
    held = made.snapshot(last=6)
    assert [e["action"] for e in held["device_traces"][0]][:2] == ["alloc", "alloc"]
    assert at_peak(tmp_path, held) == {FORWARD: 18, BACKWARD: 4, OPTIMIZER: 2}
    # Of what was freed within the ring, and allocated before it, nothing is known.
    assert at_peak(tmp_path, made.snapshot(last=5))[BEFORE] == 10


def test_without_events_the_moment_of_the_snapshot_is_the_peak(tmp_path: Path) -> None:
    held = {**dumps.training().snapshot(), "device_traces": []}
    (peak,) = of(tmp_path, held, "memory_peak").to_dict("records")
    assert (peak["events"], peak["peak_bytes"], peak["reserved_bytes"]) == (0, 10 * MB, 40 * MB)
    assert at_peak(tmp_path, held) == {FORWARD: 8, OPTIMIZER: 2}
    with pytest.raises(NotMeasured, match="_record_memory_history"):
        of(tmp_path, held, "memory_curve")


def test_the_curve_adds_up_to_what_is_held(tmp_path: Path) -> None:
    curve = of(tmp_path, dumps.training().snapshot(), "memory_curve")
    total = curve.groupby("moment")["bytes"].sum()
    assert (total.max(), total.iloc[-1]) == (24 * MB, 10 * MB)
    assert curve.loc[curve["bytes"].idxmax(), "site"] == FORWARD


def test_a_thinned_curve_keeps_its_peak_and_sums_up_small_lines(tmp_path: Path) -> None:
    made = Allocator()
    first = made.segment()
    for n in range(snapshot.MOST_DRAWN + 3):
        made.alloc(first + n * MB, (n + 1) * 512, dumps.stack(("f", f"/home/me/job/{n}.py", 1)))
    for n in range(snapshot.MOST_POINTS):
        made.free(made.alloc(first + 10 * MB, (4 if n == 101 else 1) * MB))
    curve = of(tmp_path, made.snapshot(), "memory_curve")
    total = curve.groupby("moment")["bytes"].sum()
    assert len(total) == snapshot.MOST_POINTS
    assert total.max() == 4 * MB + 36 * 512
    assert (curve["site"].nunique(), OTHERS in set(curve["site"])) == (snapshot.MOST_DRAWN + 1, True)


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    sites = ["f (/a/b/x.py:1)", "g (/a/c/x.py:2)", "h (/a/b/y.py:3)", "backward of N", "i (z.py:4)"]
    assert [*shortened(sites).values()] == [
        *("f (b/x.py:1)", "g (c/x.py:2)", "h (y.py:3)", "backward of N", "i (z.py:4)"),
    ]


# -- how free memory lies

COLUMNS = ["allocated_bytes", "reserved_bytes", "free_bytes", "split_bytes", "largest_bytes"]


def state(path: Path, held: Any) -> Any:
    return measured(write(path / "s.pickle", held), memory_state).frame(memory_state).set_index("moment")


def test_free_pieces_of_the_end(tmp_path: Path) -> None:
    frame = state(tmp_path, dumps.training().snapshot())
    # 12 MB behind the parameters; before and behind the optimizer's 2 MB, 10 and 8 MB.
    assert frame.loc["end", COLUMNS].tolist() == [10 * MB, 40 * MB, 30 * MB, 30 * MB, 12 * MB]
    assert "oom" not in frame.index
    made = Allocator()
    made.segment()  # one that is free as a whole is not in pieces
    made.alloc(made.segment(), 5 * MB)
    assert state(tmp_path, made.snapshot()).loc["end", COLUMNS].tolist() == [5 * MB, 40 * MB, 35 * MB, 15 * MB, 20 * MB]


def test_free_pieces_when_a_request_failed_and_after_that(tmp_path: Path) -> None:
    made = dumps.ran_out(pieces=True)
    for address in list(made.blocks):  # what unwinding frees before the snapshot
        made.free(address)
    frame = state(tmp_path, made.snapshot())
    assert frame.loc["oom", COLUMNS].tolist() == [20 * MB, 40 * MB, 20 * MB, 20 * MB, 10 * MB]
    assert frame.loc["oom", ["requested_bytes", "device_free_bytes", "ooms"]].tolist() == [15 * MB, 1 * MB, 1]
    assert frame.loc["oom", "site"] == FORWARD
    assert frame.loc["oom", "at_ns"] == traces.BASE_NS + 400_000
    assert frame.loc["end", COLUMNS].tolist() == [0, 40 * MB, 40 * MB, 0, 20 * MB]


def test_a_free_piece_of_another_stream_serves_nobody(tmp_path: Path) -> None:
    made = dumps.ran_out(pieces=True)
    made.events[-1]["stream"] = 7
    assert state(tmp_path, made.snapshot()).loc["oom", "largest_bytes"] == 0


def growing() -> Allocator:
    """Run out of memory with expandable segments, which are not followed."""
    made = dumps.ran_out(pieces=True)
    for event in made.events:
        event["action"] = event["action"].replace("segment_alloc", "segment_map")
    made.note("segment_unmap", addr=dumps.BASE, size=1)
    return made


def test_segments_that_grow_are_not_followed(tmp_path: Path) -> None:
    frame = state(tmp_path, growing().snapshot())
    assert frame.loc["oom", ["split_bytes", "largest_bytes"]].isna().all()


def test_gaps_are_what_lies_between_blocks() -> None:
    segments, sizes = np.array([1000, 100, 5000]), np.array([50, 100, 10])
    found = gaps(segments, sizes, np.array([120, 150, 1000]), np.array([10, 50, 50]))
    assert [column.tolist() for column in found] == [[20, 20, 10], [0, 0, 2], [False, False, True]]


@REAL
def test_a_real_snapshot_ends_with_what_its_segments_say() -> None:
    run = measured(SNAPSHOT, snapshot.memory_peak, memory_state)
    (peak,) = run.frame(snapshot.memory_peak).to_dict("records")
    assert peak["reserved_bytes"] == 786_432_000
    assert peak["end_bytes"] == 423_759_360  # allocated_size of its segments, added up
    assert peak["peak_bytes"] > peak["end_bytes"]
    (row,) = run.frame(memory_state).to_dict("records")
    assert (row["allocated_bytes"], row["reserved_bytes"]) == (423_759_360, 786_432_000)
    assert 0 < row["split_bytes"] < row["free_bytes"] == 786_432_000 - 423_759_360


# -- how a rank ran out of memory

GIB = 1 << 30

# As PyTorch 2.13 words it.
SAID = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB is free."
    " Including non-PyTorch memory, this process has 77.80 GiB memory in use. Of the allocated memory 75.00 GiB is"
    " allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory"
    " is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
FAILURE = {"type": "OutOfMemoryError", "text": SAID, "site": "forward (/home/me/model.py:10)"}
CPU = {"device": {"type": "cpu", "memory_bytes": 16 * GB}, "host": "node-1"}


def recorded(folder: Path, facts: dict[str, Any], **info: Any) -> Path:
    """Record 30 steps that a rank took until it died."""
    return runs.recorded(folder / "run", (None, [runs.light(n, 10 * MS) for n in range(30)], facts), **info)


def samples(path: Path, rss: int, left: int, used: int) -> None:
    """Write the last readings of the process and of its host, bytes."""
    row = {"at_ns": BASE_NS, "perf_ns": 1}
    (path / "ranks/00000/processes.jsonl").write_text(
        json.dumps(row | {"rss_bytes": rss, "children_rss_bytes": 0}) + "\n"
    )
    (path / "hosts/node-1").mkdir(parents=True)
    host = row | {"memory_used_bytes": used, "memory_available_bytes": left}
    (path / "hosts/node-1/host.jsonl").write_text(json.dumps(host) + "\n")


def rows(path: Path) -> list[dict[Any, Any]]:
    return runs.measured(path, memory_failures).frame(memory_failures).to_dict("records")


def test_the_error_that_ended_a_rank_has_all_that_pytorch_says(tmp_path: Path) -> None:
    path = recorded(tmp_path, {**GPU, "failure": FAILURE, "ended": "exit"}, exit={"code": 1, "signal": None})
    allocator.write(path, [allocator.reading(n, 70 * GB) for n in range(9)])
    (row,) = rows(path)
    assert (row["rank"], row["device"], row["how"], row["step"]) == (0, "0", ERROR, 29)
    assert row["site"] == "forward (model.py:10)"
    assert row["requested_bytes"] == 2.5 * GIB
    assert row["allocated_bytes"] == 75 * GIB
    assert row["reserved_bytes"] == 75.5 * GIB
    assert row["device_free_bytes"] == 1.25 * GIB
    assert row["total_bytes"] == pytest.approx(79.1 * GIB)


@pytest.mark.parametrize("graphs", [0, 9])
def test_graphs_that_validation_keeps_are_named_where_gradients_are_on_in_it(graphs: int, tmp_path: Path) -> None:
    facts = {**GPU, "failure": FAILURE, "evaluation": {"steps": 10, "with_graph": graphs}}
    found = ask(out_of_memory.RULE, recorded(tmp_path, facts, exit={"code": 1, "signal": None}))
    assert found.state == "found"
    assert any("inference_mode" in advice for advice in found.advice) == bool(graphs)


def test_an_error_in_other_words_leaves_the_last_reading(tmp_path: Path) -> None:
    path = recorded(tmp_path, {**GPU, "failure": FAILURE | {"text": "out of memory"}})
    allocator.write(path, [allocator.reading(n, (70 + n) * GB) for n in range(9)])
    (row,) = rows(path)
    assert row["allocated_bytes"] == 78 * GB
    assert str(row["requested_bytes"]) == "nan"


KILL, ENDED = {"exit": {"code": None, "signal": 9}}, {"exit": {"code": 1, "signal": None}}
OF_KERNEL = {"exit": {"code": 137, "signal": None}, "oom_kills": 1}
CONTAINER = CPU | {"cpu": {"memory_limit_bytes": 3 * GB}}
NEARLY = 28 * GB // 10

# Facts, the end of the run, and the last readings of the process and what its host has left → who killed it.
KILLS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int], tuple[Any, ...]]] = {
    "the kernel": (CPU, OF_KERNEL, (3 * GB, 9 * GB), (KERNEL, "host", 3 * GB, 16 * GB)),
    "a container grants less than the host": (CONTAINER, KILL, (NEARLY, 9 * GB), (KILLED, "host", NEARLY, 3 * GB)),
    "nothing left on the host": (CPU, KILL, (3 * GB, GB // 4), (KILLED, "host", 3 * GB, 16 * GB)),
    "somebody, with memory left": (CPU, KILL, (3 * GB, 9 * GB), ()),
    "nobody: it wrote its end": (CPU | {"ended": "exit"}, ENDED, (15 * GB, GB), ()),
    "nobody: it ended well": (CPU, {"exit": {"code": 0, "signal": None}, "oom_kills": 1}, (15 * GB, GB), ()),
}


@pytest.mark.parametrize("name", KILLS)
def test_a_process_was_killed_by(name: str, tmp_path: Path) -> None:
    facts, info, (rss, left), found = KILLS[name]
    path = recorded(tmp_path, facts, **info)
    samples(path, rss=rss, left=left, used=16 * GB - left)
    columns = ("how", "device", "allocated_bytes", "total_bytes")
    assert [tuple(row[c] for c in columns) for row in rows(path)] == ([found] if found else [])


# -- which changes would have fitted


def changes(*then: tuple[str, str, float]) -> pd.DataFrame:
    """Return what changes make of a peak of 80 GB: change, value, GB then."""
    rows = [("", "", 80), *then]
    frame = pd.DataFrame([(c, v, n * GB) for c, v, n in rows], columns=["change", "value", "then_bytes"])
    return frame.assign(now_bytes=80.0 * GB, device="cuda:0")


def failure(asked: float = 4 * GB, held: float = 76 * GB, total: float = 79 * GB, device: str = "0") -> dict[str, Any]:
    return {"allocated_bytes": held, "requested_bytes": asked, "total_bytes": total, "device": device}


CHECKPOINTS = ("checkpoint", "layers.*", 50.0)
KNOWN = changes(("batch", "0.5", 45), CHECKPOINTS, ("8_bit", "", 70), ("offload", "", 60), ("shard", "1/2", 78.9))


def test_changes_that_fit_are_named_with_their_peak_and_those_that_compute_the_same_first() -> None:
    found = cures(KNOWN, failure())
    assert [c.text for c in found] == [
        "the optimizer state on the host: about 60 GB instead of 80 GB",
        "`torch.utils.checkpoint` around `layers.*`: about 50 GB instead of 80 GB",
        "an optimizer with 8-bit state: about 70 GB instead of 80 GB",
        "0.50 times the batch: about 45 GB instead of 80 GB",
    ]  # sharding leaves hardly less than was needed
    assert [c.numerics for c in found] == [False, False, True, True]


def test_a_longer_batch_than_was_counted_needs_more_of_all_that_is_left() -> None:
    # 96 GB are needed where 80 were counted: 1.2 times what each change leaves, of which 8 bits no longer fit.
    found = cures(changes(CHECKPOINTS, ("8_bit", "", 70)), failure(asked=20 * GB))
    assert [c.text for c in found] == ["`torch.utils.checkpoint` around `layers.*`: about 60 GB instead of 96 GB"]


def test_what_was_not_counted_is_not_cured() -> None:
    assert cures(None, failure()) == []
    assert cures(KNOWN, failure(total=nan)) == []
    assert cures(KNOWN, failure(held=nan)) == []
    assert cures(KNOWN, failure(device="host")) == []
    # Twice of what was counted and more: something else has grown.
    assert cures(KNOWN, failure(asked=100 * GB)) == []


def test_a_killed_process_had_filled_the_memory() -> None:
    frame = changes(CHECKPOINTS).assign(device="cpu")
    found = cures(frame, failure(asked=nan, held=70 * GB, total=80 * GB, device="host"))
    assert [c.text for c in found] == ["`torch.utils.checkpoint` around `layers.*`: about 50 GB instead of 80 GB"]


def test_every_change_has_words() -> None:
    words = {named(c, v) for c, v in (("shard", "1/8"), ("shard", "3/8"), ("microbatches", "16"), ("schedule", "1F1B"))}
    assert words == {
        "ZeRO 1 over the 8 ranks",
        "`fully_shard` (ZeRO 3) over the 8 ranks",
        "16 micro-batches",
        "the pipeline schedule 1F1B",
    }
