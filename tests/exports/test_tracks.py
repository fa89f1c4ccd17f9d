"""What is drawn of a rank: its longest spans, dlprof's own tracks within them, and counters while it was traced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.errors import NotMeasured
from dlprof.exports import perfetto
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def recorded(folder: Path, *stalls: int) -> Path:
    """Record a rank whose steps 10 and 11 of 20, a second each, are traced; it stalls in the named ones."""
    steps = [runs.light(n, 900 * MS) for n in range(20)]
    made = traces.trace(*(traces.step(n, n * 1_000 * MS, 900 * MS) for n in (10, 11)), world_size=1, device="")
    return runs.recorded(
        folder, (made, steps, runs.CPU), stalls=[[runs.stall("checkpoint", n, 50 * MS) for n in stalls]]
    )


def test_the_shortest_spans_are_left_out_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "MOST_SPANS", 10)
    monkeypatch.setattr(perfetto, "FEWEST_SPANS", 10)
    ops = [traces.op(f"op {n}", n * 10_000, 1_000 + n) for n in range(50)]
    path = runs.foreign(tmp_path / "job", traces.trace(traces.step(0, 0, MS), *ops, world_size=1))
    frame = runs.measured(path, perfetto.reduced).frame(perfetto.reduced)
    spans = frame[frame["of"] > 0]
    assert set(spans["name"]) == {"ProfilerStep#0", *(f"op {n}" for n in range(41, 50))}
    assert set(spans["of"]) == {51}
    assert set(spans["category"]) == {"user_annotation", "cpu_op"}


def test_loader_workers_stalls_and_steps_of_a_recording_have_their_tracks(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", 10, 3)
    runs.loading(path, 0, step=900 * MS, wait=MS, fetch=300 * MS, cpu=MS, n=20, workers=2)
    frame = runs.measured(path, perfetto.reduced).frame(perfetto.reduced)
    own = dict(iter(frame[frame["of"] == 0].groupby("track")))
    # What lies outside of the traced steps is left out.
    assert own[perfetto.STEPS]["name"].to_list() == ["train step 10", "train step 11"]
    assert own[perfetto.STALLS][["name", "dur_ns"]].to_numpy().tolist() == [["checkpoint", 50 * MS]]
    # Two workers fetch from step 10 on, 300 ms a batch: each has six or seven of them begun by 1,900 ms.
    for worker in (0, 1):
        assert own[f"loader worker {worker}"]["dur_ns"].to_list() == [300 * MS] * 7


def test_a_rank_without_own_tracks_has_its_spans(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path / "job", traces.trace(traces.op("a", 0, 10), world_size=1))
    frame = runs.measured(path, perfetto.reduced).frame(perfetto.reduced)
    assert frame[["name", "of"]].to_numpy().tolist() == [["a", 1]]


def test_what_was_sampled_at_another_time_is_left_out(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run")
    times = [traces.BASE_NS + at * 1_000 * MS for at in (-100, 9, 11, 100)]
    lines = [json.dumps({"at_ns": at, "temperature_c": 40 + n}) for n, at in enumerate(times)]
    (path / "ranks/00000/gpu.jsonl").write_text("\n".join(lines) + "\n")
    frame = runs.measured(path, perfetto.counters).frame(perfetto.counters)
    # What was read before holds when the trace begins.
    assert frame[["name", "unit", "at_ns", "value"]].to_numpy().tolist() == [
        ["GPU: temperature", "°C", traces.BASE_NS + 10_000 * MS, 41.0],
        ["GPU: temperature", "°C", times[2], 42.0],
    ]


def test_where_nothing_was_sampled_there_are_no_counters(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="nothing was sampled"):
        runs.measured(recorded(tmp_path / "run"), perfetto.counters).frame(perfetto.counters)
