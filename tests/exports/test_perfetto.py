"""The reduced trace keeps to the Trace Event Format, is read back as it was, and says what it left out."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.errors import DlprofError
from dlprof.exports import perfetto
from dlprof.exports import tracks as tracks_of_ranks
from dlprof.read.kineto import torch_trace
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.allocator import reading
from tests.fixtures.runs import MS

Event = dict[str, Any]


def job(rank: int, late: int, ahead: int = 0, host: str = "node-1") -> dict[str, Any]:
    """Return a trace of two steps in which this rank comes so late to an all-reduce that all leave at 700 µs."""
    events: list[Any] = []
    for n in range(2):
        t = n * MS + ahead
        events += [
            traces.step(n, t, MS),
            traces.op("aten::mm", t + 10_000, 100_000),
            traces.launched("gemm", t + 20_000, t + 50_000, 150_000, 10 * n + 1),
            traces.collective(t + 300_000 + late, 400_000 - late, 1_000, correlation=10 * n + 2),
        ]
    return traces.trace(*events, rank=rank, host=host)


def written(path: Path, out: Path) -> tuple[list[Event], perfetto.Written]:
    made = perfetto.write(open_run(path), out, jobs=1)
    data = json.loads(gzip.decompress(out.read_bytes()) if out.suffix == ".gz" else out.read_bytes())
    return data["traceEvents"], made


def tracks(events: list[Event]) -> dict[tuple[str, str], list[Event]]:
    """Return the spans of each track, by the names of process and track."""
    names = {
        (e["pid"], e["tid"], e["name"]): e["args"]["name"]
        for e in events
        if "name" in e.get("args", {}) and e["ph"] == "M"
    }
    found: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            process = names[e["pid"], e["pid"], "process_name"]
            found[process, names[e["pid"], e["tid"], "thread_name"]].append(e)
    return dict(found)


def check(events: list[Event]) -> None:
    """Hold events to the format: fields by phase, spans of a track in or behind each other, arrows with two ends."""
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[int, dict[str, Event]] = defaultdict(dict)
    for e in events:
        assert {"ph", "pid", "tid", "name"} <= e.keys()
        assert isinstance(e["pid"], int)
        assert isinstance(e["tid"], int)
        assert e["pid"] > 0
        if e["ph"] == "X":
            assert e["ts"] >= 0
            assert e["dur"] >= 0
            lanes[e["pid"], e["tid"]].append((round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)))
        elif e["ph"] in "sf":
            assert e["ph"] not in arrows[e["id"]], "an arrow has one beginning and one end"
            arrows[e["id"]][e["ph"]] = e
        elif e["ph"] == "C":
            assert e["ts"] >= 0
            assert [type(value) for value in e["args"].values()] in ([int], [float])
        else:
            assert e["ph"] == "M"
    for spans in lanes.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "a span ends behind the one that it began in"
            open_until.append(end)
    for ends in arrows.values():
        assert set(ends) == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        for e in ends.values():
            assert any(a <= round(e["ts"] * 1000) <= b for a, b in lanes[e["pid"], e["tid"]])


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


def sampled_job(folder: Path) -> Path:
    """Record a rank whose steps 10 and 11, a second each, are traced; its GPU is read in the middle of each."""
    steps = [runs.light(n, 900 * MS) for n in range(20)]
    made = traces.trace(*(traces.step(n, n * 1_000 * MS, 900 * MS) for n in (10, 11)), world_size=1, device="")
    path = runs.recorded(folder, (made, steps, runs.CPU))
    told: dict[str, tuple[int, list[dict[str, Any]]]] = {
        "gpu.jsonl": (500, [{"power_w": 100 + n, "busy_share": 0.5, "clock_reasons_bits": 1} for n in range(20)]),
        "processes.jsonl": (0, [{"cpu_s": 0.25 * n} for n in range(20)]),
        "memory.jsonl": (900, [reading(n, n * 1_000, reserved_bytes=2_000) for n in range(20)]),
    }
    for name, (at, rows) in told.items():
        lines = [json.dumps(row | {"at_ns": traces.BASE_NS + (1_000 * n + at) * MS}) for n, row in enumerate(rows)]
        (path / "ranks/00000" / name).write_text("\n".join(lines) + "\n")
    return path


def counters(events: list[Event]) -> dict[str, list[tuple[float, float]]]:
    """Return the values of each counter, with when they begin in ms, by its name and unit."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "C":
            ((unit, value),) = e["args"].items()
            found[f"{e['name']} {unit}"].append((e["ts"] / 1_000, value))
    return dict(found)


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
    with pytest.raises(DlprofError, match=r"nowhere/out\.json: cannot be written: No such file"):
        perfetto.write(run, tmp_path / "nowhere/out.json", jobs=1)
    with pytest.raises(DlprofError, match="No space left"):
        perfetto.write(run, Path("/dev/full"), jobs=1)
    assert Path("/dev/full").is_char_device()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
