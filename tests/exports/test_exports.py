"""What other tools read of a run: CSV tables, Perfetto traces and speedscope stacks hold what the run does."""

from __future__ import annotations

import csv
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.diagnosis import every_frame
from dlprof.analysis.engine import RankData
from dlprof.analysis.rules import RULES
from dlprof.analysis.step.breakdown import breakdown
from dlprof.errors import DlprofError, NotMeasured
from dlprof.exports import frames, perfetto, speedscope
from dlprof.read.kineto import torch_trace
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.exported import check, counters, job, sampled_job, tracks, written
from tests.fixtures.runs import CPU, MS, light
from tests.fixtures.sampled_stacks import LOADER, MAIN, stacked

# CSV.


@pytest.mark.long
def test_tables_and_measures_come_back_as_they_were_from_any_number_of_processes(tmp_path: Path) -> None:
    run = open_run(runs.foreign(tmp_path / "job", *(traces.training(rank=r) for r in range(2))))
    made = [frames.write(run, tmp_path / f"csv{jobs}", jobs=jobs) for jobs in (1, 2)]
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / f"csv{jobs}").rglob("*.csv")} for jobs in (1, 2))
    assert (made[0], one) == (made[1], two)
    for rank in run.ranks:
        data = RankData(rank)
        for name in data.tables:
            table = data.table(name)
            back = pd.read_csv(tmp_path / "csv1" / "tables" / f"{rank.index:05d}" / f"{name}.csv")
            assert list(back.columns) == list(table.columns)
            numbers = [c for c in table.columns if table[c].dtype.kind in "if"]
            pd.testing.assert_frame_equal(back[numbers], table[numbers].reset_index(drop=True), check_dtype=False)
    parts = pd.read_csv(tmp_path / "csv1" / "measures" / "breakdown.csv")
    measured = runs.measured(tmp_path / "job", breakdown).frame(breakdown)
    assert parts[["category", "ns"]].to_numpy().tolist() == measured[["category", "ns"]].to_numpy().tolist()
    assert (made[0].tables, made[0].measures) == (4, len(list((tmp_path / "csv1" / "measures").iterdir())))


def test_what_was_not_measured_is_listed_and_no_cell_is_a_formula(tmp_path: Path) -> None:
    trace = traces.training(world_size=1)
    formulas = ("=HYPERLINK(A1)", "+1", "-1+1", "@SUM(A1)", "\t=1", " =cmd|' /C calc'!A0", "\uff1d1", "\n=1")
    ops = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    for event, formula in zip(ops[: len(formulas)], formulas, strict=True):
        event["name"] = formula
    trace["traceEvents"][-1]["name"] = "a\r=1"
    trace["traceEvents"][-2]["name"] = "\x1b]0;title\x07\x9b2J"
    made = frames.write(open_run(runs.foreign(tmp_path / "job", trace)), tmp_path / "csv", jobs=1)
    with (tmp_path / "csv" / "not_measured.csv").open() as file:
        silent = {row["measure"]: row["why"] for row in csv.DictReader(file)}
    assert silent["matched"].startswith("one rank: ")
    assert len(silent) == made.not_measured
    assert made.measures + made.not_measured == len(every_frame(RULES))
    assert not (tmp_path / "csv" / "measures" / "matched.csv").exists()
    found = set()
    for path in (tmp_path / "csv").rglob("*.csv"):
        with path.open(newline="") as file:
            found |= {cell for row in csv.reader(file) for cell in row}
    for cell in found:
        assert not set(cell) & {*map(chr, range(9)), "\r", "\x1b", "\x9b"}
        try:
            float(cell)
        except ValueError:
            assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert {*(f"'{formula}" for formula in formulas), r"a\r=1", r"\x1b]0;title\x07\x9b2J"} <= found


@pytest.mark.parametrize("taken", ["csv", "csv/tables"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, taken: str) -> None:
    run = open_run(runs.foreign(tmp_path / "job", traces.training(world_size=1)))
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("a file")
    with pytest.raises(DlprofError, match="cannot be written"):
        frames.write(run, tmp_path / "csv", jobs=1)


# Perfetto.


def test_every_rank_is_a_process_with_its_tracks_on_one_clock(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path / "job", job(0, 0), job(1, 250_000, ahead=5 * MS, host="node-2"))
    events, made = written(path, tmp_path / "out.json.gz")
    check(events)
    found = tracks(events)
    for rank in (0, 1):
        mine = {track: spans for (of, track), spans in found.items() if of == f"rank {rank} · node-{rank + 1}"}
        assert [e["name"] for e in mine["steps"]] == ["train step 0", "train step 1"]
        assert sum(e["dur"] for e in mine["where the step goes"]) == pytest.approx(2_000)
        assert [e["name"] for e in mine["collectives"]] == ["all_reduce 0"] * 2
        assert {e["name"] for e in mine["device stream 7"]} == {"gemm"}
    ends = [[e["ts"] + e["dur"] for e in found[f"rank {r} · node-{r + 1}", "collectives"]] for r in (0, 1)]
    assert ends[0] == pytest.approx(ends[1], abs=0.001)
    assert [(e["name"], e["dur"]) for e in found["rank 0 · node-1", "waits for"]] == [("rank 1", 250.0)] * 2
    assert ("rank 1 · node-2", "waits for") not in found
    assert (made.left_out, made.arrows) == (0, 2)


def test_our_own_reader_gives_back_what_went_in_and_hostile_names_stay_names(tmp_path: Path) -> None:
    made, name = traces.training(world_size=1), 'a "quoted" \\ name\n</script>\u2028'
    next(event for event in made["traceEvents"] if event.get("cat") == "cpu_op")["name"] = name
    path = runs.foreign(tmp_path / "job", made)
    written(path, tmp_path / "out.json.gz")

    def rows(file: Path) -> list[tuple[Any, ...]]:
        spans = torch_trace.read(file).tables["spans"][["kind", "name", "start_ns", "dur_ns"]]
        return sorted(spans.astype({"kind": "str", "name": "str"}).itertuples(index=False, name=None))

    assert rows(tmp_path / "out.json.gz") == rows(path / "rank0.json.gz")
    assert name in {row[1] for row in rows(tmp_path / "out.json.gz")}


def test_the_shortest_spans_are_left_out_first_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "FEWEST_SPANS", 10)
    monkeypatch.setattr(perfetto, "MOST_SPANS", 10)
    ops = [traces.op(f"op {n}", n * 10_000, 1_000 + n) for n in range(50)]
    path = runs.foreign(tmp_path / "job", traces.trace(traces.step(0, 0, MS), *ops, world_size=1))
    events, made = written(path, tmp_path / "out.json")
    check(events)
    assert (made.spans, made.left_out, made.shortest_ns) == (10, 41, 1_041)
    frame = runs.measured(path, perfetto.reduced).frame(perfetto.reduced)
    spans = frame[frame["of"] > 0]
    assert set(spans["name"]) == {"ProfilerStep#0", *(f"op {n}" for n in range(41, 50))}
    assert (set(spans["of"]), set(spans["category"])) == ({51}, {"user_annotation", "cpu_op"})
    alone = runs.foreign(tmp_path / "alone", traces.trace(traces.op("a", 0, 10), world_size=1))
    frame = runs.measured(alone, perfetto.reduced).frame(perfetto.reduced)
    assert frame[["name", "of"]].to_numpy().tolist() == [["a", 1]]  # no tracks of dlprof's own


def test_spans_that_overlap_go_to_a_further_track() -> None:
    times = {"start_ns": np.array([0, 10, 50, 200]), "dur_ns": np.array([100, 10, 100, 10])}
    rows = pd.DataFrame({"track": ["a"] * 4, "name": ["outer", "inner", "beyond", "later"], **times})
    placed, names = perfetto.placed(rows)
    assert names == ["a", "a (2)"]
    assert dict(zip(placed["name"], placed["place"], strict=True)) == {"outer": 1, "inner": 1, "later": 1, "beyond": 2}


def recorded(folder: Path, *stalls: int) -> Path:
    """Record a rank whose steps 10 and 11 of 20, a second each, are traced; it stalls in the named ones."""
    steps = [light(n, 900 * MS) for n in range(20)]
    made = traces.trace(*(traces.step(n, n * 1_000 * MS, 900 * MS) for n in (10, 11)), world_size=1, device="")
    return runs.recorded(folder, (made, steps, CPU), stalls=[[runs.stall("checkpoint", n, 50 * MS) for n in stalls]])


def test_workers_stalls_and_steps_of_a_recording_have_tracks_within_the_traced_steps(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", 10, 3)
    runs.loading(path, 0, step=900 * MS, wait=MS, fetch=300 * MS, cpu=MS, n=20, workers=2)
    frame = runs.measured(path, perfetto.reduced).frame(perfetto.reduced)
    own = dict(iter(frame[frame["of"] == 0].groupby("track")))
    assert own[perfetto.STEPS]["name"].to_list() == ["train step 10", "train step 11"]
    assert own[perfetto.STALLS][["name", "dur_ns"]].to_numpy().tolist() == [["checkpoint", 50 * MS]]
    # Two workers fetch from step 10 on, 300 ms a batch: each has six or seven of them begun by 1,900 ms.
    for worker in (0, 1):
        assert own[f"loader worker {worker}"]["dur_ns"].to_list() == [300 * MS] * 7


def test_samples_are_counters_while_the_trace_lasts(tmp_path: Path) -> None:
    events, _ = written(sampled_job(tmp_path / "run"), tmp_path / "out.json")
    check(events)
    # The trace lasts 1.9 s. What was read before holds when it begins; a rate is of the time before its reading.
    assert counters(events) == {
        "GPU: power W": [(0, 109), (500, 110), (1_500, 111)],
        "GPU: some kernel runs %": [(0, 50), (500, 50), (1_500, 50)],
        "process: cores in use cores": [(0, 0.25), (1_000, 0.25)],
        "PyTorch: memory of tensors bytes": [(0, 9_000), (900, 10_000)],
        "PyTorch: memory reserved bytes": [(0, 2_000), (900, 2_000)],
    }
    with pytest.raises(NotMeasured, match="nothing was sampled"):
        runs.measured(recorded(tmp_path / "none"), perfetto.counters).frame(perfetto.counters)


def test_counters_are_on_the_clock_of_the_spans(tmp_path: Path) -> None:
    ahead = 5 * MS
    ranks: Any = (
        (job(0, 0), [], {**CPU, "host": "node-1"}),
        (job(1, 250_000, ahead, "node-2"), [], {**CPU, "host": "node-2"}),
    )
    path = runs.recorded(tmp_path / "run", *ranks)
    for rank in (0, 1):
        line = json.dumps({"at_ns": traces.BASE_NS + MS + rank * ahead, "temperature_c": 40})
        (path / f"ranks/{rank:05d}/gpu.jsonl").write_text(f"{line}\n")
    events, _ = written(path, tmp_path / "out.json")
    steps = {e["pid"]: e["ts"] for e in events if e["ph"] == "X" and e["name"] == "ProfilerStep#1"}
    assert {e["pid"]: e["ts"] for e in events if e["ph"] == "C"} == pytest.approx(steps)


def test_a_pipe_is_written_to_and_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    run = open_run(runs.foreign(tmp_path / "run", job(0, 0)))
    pipe = tmp_path / "out.json"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        got = reader.submit(pipe.read_text)
        perfetto.write(run, pipe, jobs=1)
        assert len(json.loads(got.result(timeout=60))["traceEvents"]) > 10
    assert pipe.is_fifo()
    with pytest.raises(DlprofError, match=r"nowhere/out\.json cannot be written: No such file"):
        perfetto.write(run, tmp_path / "nowhere/out.json", jobs=1)
    with pytest.raises(DlprofError, match="No space left"):
        perfetto.write(run, Path("/dev/full"), jobs=1)
    assert Path("/dev/full").is_char_device()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "run"]


def test_without_a_trace_or_stacks_there_is_nothing_to_export(tmp_path: Path) -> None:
    run = open_run(runs.recorded(tmp_path / "run", (None, [light(n, MS) for n in range(9)], CPU)))
    with pytest.raises(DlprofError, match="nothing to export"):
        perfetto.write(run, tmp_path / "out.json", jobs=1)
    with pytest.raises(DlprofError, match="no Python stacks were seen"):
        speedscope.write(run, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


# Speedscope.


def profiles(path: Path) -> tuple[Any, dict[str, dict[tuple[str, ...], int]]]:
    """Return what is written, and of each profile how often each stack was seen."""
    out = path.parent / "s.json"
    speedscope.write(open_run(path), out)
    data = json.loads(out.read_text())
    names = [frame["name"] for frame in data["shared"]["frames"]]
    return data, {
        p["name"]: {tuple(names[i] for i in stack): n for stack, n in zip(p["samples"], p["weights"], strict=True)}
        for p in data["profiles"]
    }


def test_a_profile_a_rank_and_role_holds_every_sample_below_its_phase(tmp_path: Path) -> None:
    other = 'process 10:"python train.py";thread (0x2): pool-1;work (pool.py:3) 7\n'
    lines = (f"{MAIN};main (train.py:5);{LOADER} 30\n", f"{MAIN};main (train.py:7) 12\n", other)
    data, seen = profiles(stacked(tmp_path / "run", *lines, ranks=2))
    training = {("(waiting for the loader)", "main", "__next__"): 30, ("(between the phases)", "main"): 12}
    assert seen == {
        f"rank {rank} · {role}": stacks
        for rank in (0, 1)
        for role, stacks in (("training thread", training), ("other threads", {("work",): 7}))
    }
    assert data["$schema"] == speedscope.SCHEMA
    first = data["profiles"][0]
    assert [first[key] for key in ("type", "unit", "startValue", "endValue")] == ["sampled", "none", 0, 42]
    assert {"name": "main", "file": "train.py", "line": 5} in data["shared"]["frames"]


def test_the_rarest_stacks_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedscope, "MOST_STACKS", 2)
    _, seen = profiles(stacked(tmp_path / "run", *(f"{MAIN};f{n} (train.py:{n}) {n}\n" for n in range(1, 6))))
    assert [list(s.values()) for s in seen.values()] == [[5, 4]]
    assert list(seen) == ["training thread (3 rarer stacks left out)"]


SAMPLED = {"type": "sampled", "name": "t", "unit": "seconds", "startValue": 0, "endValue": 8, "samples": [[0]]}
JSON = {"$schema": speedscope.SCHEMA, "shared": {"frames": [{"name": "main", "file": "a.py", "line": 1}]}}


@pytest.mark.parametrize(
    ("file", "content", "unit", "total"),
    [
        ("stacks.txt", "main (a.py:1);work (a.py:2) 5\nmain (a.py:1) 3\n", "none", 8),
        ("p.json", json.dumps(JSON | {"profiles": [SAMPLED | {"weights": [8]}]}), "nanoseconds", 8_000_000_000),
    ],
)
def test_stacks_of_other_tools_are_written_too(tmp_path: Path, file: str, content: str, unit: str, total: int) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / file).write_text(content)
    data, _ = profiles(tmp_path / "from" / file)
    (profile,) = data["profiles"]
    assert (profile["name"], profile["unit"]) == (f"training thread · {file}", unit)
    assert sum(profile["weights"]) == profile["endValue"] == total
