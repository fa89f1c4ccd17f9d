"""The reduced trace keeps to the Trace Event Format, is read back as it was, and says what it left out."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.errors import DlprofError
from dlprof.exports import perfetto
from dlprof.exports import perfetto as tracks_of_ranks
from dlprof.read.kineto import torch_trace
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.exported import check, counters, job, sampled_job, tracks, written
from tests.fixtures.runs import MS


def test_every_rank_is_a_process_with_tracks_of_its_own(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path / "job", job(0, 0), job(1, 250_000))
    events, made = written(path, tmp_path / "out.json.gz")
    check(events)
    found = tracks(events)
    for rank in (0, 1):
        mine = {track: spans for (process, track), spans in found.items() if process == f"rank {rank} · node-1"}
        assert [e["name"] for e in mine["steps"]] == ["train step 0", "train step 1"]
        assert sum(e["dur"] for e in mine["where the step goes"]) == pytest.approx(2_000)
        assert [e["name"] for e in mine["collectives"]] == ["all_reduce 0"] * 2
        assert {e["name"] for e in mine["device stream 7"]} == {"gemm"}
    waits = found["rank 0 · node-1", "waits for"]
    assert [(e["name"], e["dur"]) for e in waits] == [("rank 1", 250.0)] * 2
    assert ("rank 1 · node-1", "waits for") not in found
    assert (made.left_out, made.arrows, made.warnings) == (0, 2, ())


def test_clocks_are_brought_together(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path / "job", job(0, 0), job(1, 250_000, ahead=5 * MS, host="node-2"))
    events, _ = written(path, tmp_path / "out.json")
    check(events)
    found = tracks(events)
    ends = [[round(e["ts"] + e["dur"], 3) for e in found[f"rank {r} · node-{r + 1}", "collectives"]] for r in (0, 1)]
    assert ends[0] == ends[1]


def test_our_own_reader_gives_back_what_went_in(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path / "job", traces.training(world_size=1))
    before = torch_trace.read(path / "rank0.json.gz").tables["spans"]
    written(path, tmp_path / "out.json.gz")
    after = torch_trace.read(tmp_path / "out.json.gz").tables["spans"]
    columns = ["kind", "name", "start_ns", "dur_ns"]

    def rows(spans: pd.DataFrame) -> list[tuple[Any, ...]]:
        return sorted(spans[columns].astype({"kind": "str", "name": "str"}).itertuples(index=False, name=None))

    assert rows(after) == rows(before)


def test_what_is_left_out_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracks_of_ranks, "FEWEST_SPANS", 10)
    monkeypatch.setattr(tracks_of_ranks, "MOST_SPANS", 10)
    ops = [traces.op(f"op {n}", n * 10_000, 1_000 + n) for n in range(50)]
    path = runs.foreign(tmp_path / "job", traces.trace(traces.step(0, 0, MS), *ops, world_size=1))
    events, made = written(path, tmp_path / "out.json")
    check(events)
    assert (made.spans, made.left_out, made.shortest_ns) == (10, 41, 1_041)


def test_what_overlaps_goes_to_a_further_track() -> None:
    rows = pd.DataFrame(
        {
            "track": ["a"] * 4,
            "name": ["outer", "inner", "beyond", "later"],
            "start_ns": np.array([0, 10, 50, 200]),
            "dur_ns": np.array([100, 10, 100, 10]),
        }
    )
    placed, tracks = perfetto.placed(rows)
    assert tracks == ["a", "a (2)"]
    assert dict(zip(placed["name"], placed["place"], strict=True)) == {"outer": 1, "inner": 1, "later": 1, "beyond": 2}


def test_what_was_sampled_meanwhile_stands_as_counters(tmp_path: Path) -> None:
    events, _ = written(sampled_job(tmp_path / "run"), tmp_path / "out.json")
    check(events)
    # The trace lasts 1.9 s. What was read before holds when it begins; a rate speaks of the time before its reading.
    assert counters(events) == {
        "GPU: power W": [(0, 109), (500, 110), (1_500, 111)],
        "GPU: some kernel runs %": [(0, 50), (500, 50), (1_500, 50)],
        "process: cores in use cores": [(0, 0.25), (1_000, 0.25)],
        "PyTorch: memory of tensors bytes": [(0, 9_000), (900, 10_000)],
        "PyTorch: memory reserved bytes": [(0, 2_000), (900, 2_000)],
    }


def test_counters_are_on_the_clock_of_the_spans(tmp_path: Path) -> None:
    ahead, late = 5 * MS, 250_000
    path = runs.recorded(
        tmp_path / "run",
        (job(0, 0), [], {**runs.CPU, "host": "node-1"}),
        (job(1, late, ahead=ahead, host="node-2"), [], {**runs.CPU, "host": "node-2"}),
    )
    for rank in (0, 1):
        at = traces.BASE_NS + MS + rank * ahead
        line = json.dumps({"at_ns": at, "temperature_c": 40})
        (path / f"ranks/{rank:05d}/gpu.jsonl").write_text(f"{line}\n")
    events, _ = written(path, tmp_path / "out.json")
    steps = {e["pid"]: e["ts"] for e in events if e["ph"] == "X" and e["name"] == "ProfilerStep#1"}
    read = {e["pid"]: e["ts"] for e in events if e["ph"] == "C"}
    assert read == pytest.approx(steps)


def test_names_that_attack_stay_names(tmp_path: Path) -> None:
    name = 'a "quoted" \\ name\n</script>\u2028'
    path = runs.foreign(tmp_path / "job", traces.trace(traces.step(0, 0, MS), traces.op(name, 0, 10), world_size=1))
    events, _ = written(path, tmp_path / "out.json")
    assert name in {e["name"] for e in events}


def test_without_a_trace_there_is_nothing_to_export(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [runs.light(n, MS) for n in range(9)], runs.CPU))
    with pytest.raises(DlprofError, match="nothing to export"):
        perfetto.write(open_run(path), tmp_path / "out.json", jobs=1)
    assert not (tmp_path / "out.json").exists()


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    run = open_run(runs.foreign(tmp_path / "run", job(0, 0)))
    pipe = tmp_path / "out.json"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        got = reader.submit(pipe.read_text)
        perfetto.write(run, pipe, jobs=1)
        assert len(json.loads(got.result(timeout=60))["traceEvents"]) > 10
    assert pipe.is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "run"]


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    run = open_run(runs.foreign(tmp_path / "run", job(0, 0)))
    with pytest.raises(DlprofError, match=r"nowhere/out\.json cannot be written: No such file"):
        perfetto.write(run, tmp_path / "nowhere/out.json", jobs=1)
    with pytest.raises(DlprofError, match="No space left"):
        perfetto.write(run, Path("/dev/full"), jobs=1)
    assert Path("/dev/full").is_char_device()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
