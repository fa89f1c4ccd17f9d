"""The step that is drawn."""

import json
from pathlib import Path

import pytest

from dlprof.analysis.step.step_timeline import MOST_STREAMS, MOST_WORKERS, excerpt
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def test_the_middle_step_is_drawn_by_lane_and_category(tmp_path: Path) -> None:
    frame = runs.rank_of(tmp_path, traces.training(3)).once(excerpt)
    assert set(frame["step"]) == {1}
    device = frame[frame["lane"] == "computation 7"]
    assert set(device["category"]) == {"computation", "copy"}
    assert set(frame.loc[frame["lane"] == "communication 21", "category"]) == {"communication"}
    assert set(frame["shown"]) == {"middle"}
    assert "sm90_gemm and 1 more" in set(device["name"])
    thread = frame[frame["lane"] == "thread"]
    assert dict(zip(thread["name"], thread["dur_ns"], strict=True)) == {"fetch": 100_000, "optimizer": 80_000}
    assert (frame["start_ns"] >= frame["begin_ns"]).all()


def test_pieces_that_are_drawn_as_one_have_the_name_of_the_longest(tmp_path: Path) -> None:
    ran = [
        ("short", 100_000, 40_000),
        ("long", 140_000, 60_000),
        ("shorter", 200_000, 20_000),
        ("alone", 500_000, 9_000),
    ]
    events = [traces.step(1, 0, MS), *(traces.kernel(*one) for one in ran)]
    frame = runs.rank_of(tmp_path, traces.trace(*events)).once(excerpt)
    drawn = frame[frame["lane"] == "computation 7"]
    assert list(zip(drawn["name"], drawn["dur_ns"], strict=True)) == [("long and 2 more", 120_000), ("alone", 9_000)]


def test_thousands_of_kernels_become_what_a_screen_can_show(tmp_path: Path) -> None:
    kernels = [traces.kernel(f"k{n % 7}", n * 1_000, 900) for n in range(10_000)]
    frame = runs.rank_of(tmp_path, traces.trace(traces.step(1, 0, 10 * MS), *kernels)).once(excerpt)
    assert len(frame) < 700


def test_a_trace_without_steps_draws_none(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured):
        runs.rank_of(tmp_path, traces.trace(traces.kernel("gemm", 0, MS))).once(excerpt)


def test_the_slowest_step_stands_beside_the_middle_one(tmp_path: Path) -> None:
    kernels = [traces.kernel("gemm", start * MS + 100, MS // 2) for start in (0, 1, 2)]
    steps = [traces.step(0, 0, MS), traces.step(1, MS, MS), traces.step(2, 2 * MS, MS * 12 // 10)]
    frame = runs.rank_of(tmp_path, traces.trace(*steps, *kernels)).once(excerpt)
    columns = (frame[c] for c in ("shown", "step", "step_ns"))
    assert set(zip(*columns, strict=True)) == {("middle", 1, MS), ("slowest", 2, MS * 12 // 10)}


def test_hidden_communication_has_its_lane_beside_the_computation(tmp_path: Path) -> None:
    events = (traces.step(1, 0, MS), traces.kernel("gemm", 0, 800_000), traces.collective(200_000, 400_000, 1_000))
    frame = runs.rank_of(tmp_path, traces.trace(*events)).once(excerpt)
    (row,) = frame[frame["lane"] == "communication 21"].to_dict("records")
    assert (row["start_ns"] - row["begin_ns"], row["dur_ns"]) == (200_000, 400_000)


def test_streams_have_lanes_by_what_they_do_and_the_idlest_have_none(tmp_path: Path) -> None:
    steps = (traces.step(1, 0, MS), traces.step(2, MS, MS))
    events = (
        traces.copy(MS + 500_000, 100_000, 9, stream=22),
        traces.kernel("early", MS - 50_000, 60_000, stream=9),
        *(traces.kernel("gemm", MS + 100_000 + n * 200_000, 100_000 + n, stream=7) for n in range(4)),
        traces.collective(MS + 200_000, 400_000, 1_000, stream=20),
        traces.kernel("elsewhere", MS + 10_000, 300_000, stream=7, device=1),
        *(traces.kernel("idler", MS + 10_000, 10_000 + n, stream=n) for n in (30, 31)),
    )
    made = traces.trace(*steps, *sorted(events, key=lambda e: float(e["ts"])))
    frame = runs.rank_of(tmp_path, made).once(excerpt)
    assert list(frame["lane"].unique()) == ["computation 7", "computation 1:7", "communication 20", "copies 22"]
    assert frame["lane"].nunique() == MOST_STREAMS
    assert set(frame["step"]) == {2}


def test_what_runs_when_the_step_begins_is_cut_and_named(tmp_path: Path) -> None:
    steps = (traces.step(1, 0, MS), traces.step(2, MS, MS))
    kernels = (traces.kernel("early", MS - 50_000, 150_000), traces.kernel("gemm", MS + 200_000, 100_000))
    frame = runs.rank_of(tmp_path, traces.trace(*steps, *kernels)).once(excerpt)
    told = zip(frame["name"], frame["start_ns"] - frame["begin_ns"], frame["dur_ns"], strict=True)
    assert list(told) == [("early", 0, 100_000), ("gemm", 200_000, 100_000)]


def test_loader_workers_have_lanes(tmp_path: Path) -> None:
    steps = [runs.light(n, MS, traces.BASE_NS + n * MS) for n in range(3)]
    folder = runs.recorded(tmp_path, (traces.trace(traces.step(0, 0, MS), traces.step(1, MS, MS)), steps, runs.CPU))
    made = {"pid": 9, "count": 1, "collate_ns": -1, "cpu_ns": -1, "delay_ns": -1, "stored_bytes": -1, "read_bytes": -1}
    fetches = [
        made | {"worker": worker, "start_ns": traces.BASE_NS + MS + at, "dur_ns": MS // 2}
        for worker, at in ((0, -MS // 4), (1, MS // 4), (MOST_WORKERS, MS // 4), (1, 5 * MS))
    ]
    (folder / "ranks/00000/fetches.jsonl").write_text("".join(json.dumps(f) + "\n" for f in fetches))
    frame = runs.measured(folder, excerpt).frame(excerpt)
    mine = frame[(frame["category"] == "worker") & (frame["shown"] == "middle")]
    told = zip(mine["lane"], mine["start_ns"] - mine["begin_ns"], mine["dur_ns"], strict=True)
    assert list(told) == [("worker 0", 0, MS // 4), ("worker 1", MS // 4, MS // 2)]
