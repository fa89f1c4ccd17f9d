"""The files that dlprof's recorder leaves: rows in order; a cut, odd or hostile line costs only itself."""

from __future__ import annotations

import gzip
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read import facts, limits, opening, stacks
from dlprof.read.formats import formats
from dlprof.read.logs import read_lines, read_steps
from dlprof.read.sources import SOURCES, Reading, Source
from dlprof.schema import LOADING, MEMORY
from tests.fixtures import jobs
from tests.fixtures.holding import row

# The list of sources.


def test_every_table_has_a_source_and_no_two_sources_read_one_file() -> None:
    recorded = {table for source in SOURCES for table in source.tables}
    assert recorded | {table for one in formats() for table in one.tables} == set(schema.TABLES)
    assert len({source.name for source in SOURCES}) == len(SOURCES)
    files = [file for source in SOURCES for file in source.files]
    assert len(set(files)) == len(files)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_a_missing_file_is_one_line_and_another_one_is_refused(source: Source, tmp_path: Path) -> None:
    assert source.absent
    with pytest.raises(DlprofError, match="no such file"):
        source.read(tmp_path / "none")
    (tmp_path / "other").write_text("not\na\nlog\n")
    with pytest.raises(DlprofError):
        source.read(tmp_path / "other")


# Logs of rows.


def read_as(kind: str) -> dict[str, Source]:
    """Return the sources that a function of logs.py reads, "rows" or "samples", by name."""
    return {s.name: s for s in SOURCES if isinstance(s.read, partial) and s.read.args[:2] == ("logs", kind)}


LOGS = read_as("rows")
STEPS = next(s for s in SOURCES if s.name == "steps")
STEP = {"step": 0, "start_ns": 1, "dur_ns": 2}
FETCHES = [{"worker": w, "pid": 70 + w, "start_ns": at, "dur_ns": 4, "count": 1} for w, at in ((1, 9), (0, 5))]
START = {"kind": "start", "start_ns": 5, "dur_ns": 3, "count": 1, "step": 0, "loader": 0, "workers": "7 8"}
BATCH = {"kind": "batch", "start_ns": 9, "dur_ns": 4, "count": 2, "step": 1, "loader": 0, "empty": 1, "ready": 3}
NEW = dict(zip(MEMORY, range(11), strict=True))
OLD = {**NEW, "at_ns": 9, "device_allocs": None, "ooms": None}
CALL = {"step": 3, "action": "schedule", "start_ns": 5, "dur_ns": 30, "busy_ns": 20}
CHUNK = {"step": 3, "action": "forward", "stage": 1, "microbatch": 0, "start_ns": 7, "dur_ns": 20}
PAUSE = {"kind": "garbage_collection", "start_ns": 5, "dur_ns": 3, "step": 1, "generation": 2, "path": None}
SAVE = {"kind": "checkpoint", "start_ns": 9, "dur_ns": 4, "step": 2, "generation": None, "path": "/d/m.pt"}
NONE: dict[str, Any] = {**dict.fromkeys(LOADING, -1), "workers": ""}


def write(path: Path, *rows: dict[str, Any] | str | bytes) -> Path:
    data = [x if isinstance(x, bytes) else (x if isinstance(x, str) else json.dumps(x)).encode() for x in rows]
    path.write_bytes(b"".join(line + b"\n" for line in data))
    return path


def read(folder: Path, name: str, *rows: dict[str, Any] | str | bytes) -> Reading:
    return LOGS[name].read(write(folder / LOGS[name].files[0], *rows))


@pytest.mark.parametrize(
    ("name", "written", "rows"),
    [
        ("fetches", FETCHES, [NONE | row | {"kind": "fetch"} for row in reversed(FETCHES)]),
        ("loading", [BATCH, START], [NONE | START, NONE | BATCH]),
        ("memory", [OLD, NEW], [NEW, {**OLD, "device_allocs": -1, "ooms": -1}]),
        ("pipeline", [CHUNK, {**CALL, "new": 1}], [CALL | {"stage": -1, "microbatch": -1}, CHUNK | {"busy_ns": -1}]),
        (
            "stalls",
            [{**SAVE, "phase": "optimizer", "new": 1}, "", PAUSE],
            [
                {**PAUSE, "path": "", "phase": "rest", "reason": "", "count": 1},
                {**SAVE, "generation": -1, "phase": "optimizer", "reason": "", "count": 1},
            ],
        ),
        *(("stalls", [{**SAVE, "count": n}], [{"count": max(n, 1)}]) for n in (-1, 0, 1, 9)),
    ],
)
def test_rows_are_in_order_of_time_and_what_does_not_apply_is_marked(
    tmp_path: Path, name: str, written: list[Any], rows: list[dict[str, Any]]
) -> None:
    reading = read(tmp_path, name, *written)
    table = reading.tables[LOGS[name].tables[0]]
    found = table.to_dict("records")
    assert [{key: one[key] for key in row if key in one} for one, row in zip(found, rows, strict=True)] == [
        {key: value for key, value in row.items() if key in table} for row in rows
    ]
    assert reading.warnings == ()


@pytest.mark.parametrize("name", LOGS)
def test_an_empty_log_is_a_job_in_which_nothing_happened_and_others_are_refused(tmp_path: Path, name: str) -> None:
    table = LOGS[name].tables[0]
    reading = read(tmp_path, name)
    assert (len(reading.tables[table]), reading.warnings) == (0, ())
    for odd in ("a", "1", '{"kind": "batch"}'):
        with pytest.raises(DlprofError, match=f"not a log of {table}: none of its lines is one"):
            read(tmp_path, name, odd, odd)


BAD = ["{", "text", "[1]", b"\xff\xfe", {"kind": "checkpoint", "step": 1}]


@pytest.mark.parametrize(
    ("source", "first", "last", "bad"),
    [
        *(
            (STEPS, STEP, STEP | {"step": 2, "start_ns": 9}, bad)
            for bad in [*BAD, STEP | {"start_ns": -5}, STEP | {"dur_ns": 1.5}]
        ),
        *((LOGS["stalls"], PAUSE, SAVE, bad) for bad in [*BAD, SAVE | {"dur_ns": -1}, SAVE | {"path": 7}]),
        (LOGS["pipeline"], CALL, CHUNK, {**CHUNK, "dur_ns": -1}),
        (LOGS["fetches"], FETCHES[1], FETCHES[0], '{"worker": 0, "pi' + json.dumps(FETCHES[1])),
    ],
)
def test_a_bad_line_is_left_out_with_a_warning_and_a_cut_last_one_without(
    tmp_path: Path, source: Source, first: Any, last: Any, bad: Any
) -> None:
    path = write(tmp_path / source.files[0], first, bad, last)
    reading = source.read(path)
    assert reading.tables[source.tables[0]]["start_ns"].to_list() == [first["start_ns"], last["start_ns"]]
    assert reading.warnings == (f"{source.files[0]}: 1 malformed lines are left out",)
    data = write(path, first, last).read_bytes()
    for cut in range(data.index(b"\n") + 1, len(data) - 1, 1 if bad == "{" else 40):
        path.write_bytes(data[:cut])
        reading = source.read(path)
        assert (reading.tables[source.tables[0]]["start_ns"].to_list(), reading.warnings) == ([first["start_ns"]], ())
    path.write_bytes(data[:-1])
    assert len(source.read(path).tables[source.tables[0]]) == 2


# Steps.


def line(number: int, **fields: Any) -> dict[str, Any]:
    made = {name: number + i for i, (name, dtype) in enumerate(schema.STEPS.items()) if dtype == "int64"}
    return made | {"step": number, "kind": "train", "start_ns": 1_735_632_360_000_000_001 + number * 1000} | fields


def test_a_line_is_a_row_and_what_it_leaves_out_was_not_measured(tmp_path: Path) -> None:
    whole, lean = line(3), {"dur_ns": 5, "step": 4, "start_ns": 2 * 10**18, "power_watts": 1.5}
    first, second = read_steps(write(tmp_path / "steps.jsonl", lean, "", whole)).tables["steps"].to_dict("records")
    assert first == {name: whole[name] for name in schema.STEPS}
    rest = {c: -1 for c in schema.STEPS if c not in lean}
    assert second == rest | {"step": 4, "start_ns": 2 * 10**18, "dur_ns": 5, "kind": "other"}
    for content in (b"", b'{"step": 1, "sta'):
        (tmp_path / "steps.jsonl").write_bytes(content)
        reading = read_steps(tmp_path / "steps.jsonl")
        assert (len(reading.tables["steps"]), reading.warnings) == (0, ("steps.jsonl: holds no steps",))


def test_a_file_of_many_blocks_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_BATCH", 100)
    path = write(tmp_path / "steps.jsonl", *(line(i) for i in range(200)))
    assert read_steps(path).tables["steps"]["step"].to_list() == list(range(200))


@pytest.mark.parametrize("device_ns", [90, -1])
def test_a_line_of_an_older_dlprof_is_read(tmp_path: Path, device_ns: int) -> None:
    """It had the device's time from the first forward on as well, amid the fields that are still there."""
    names = ("lead_ns", "fetch_ns", "forward_ns", "backward_ns", "optimizer_ns", "fetches", "backwards")
    row = {"step": 7, "kind": "train", "start_ns": 1000, "dur_ns": 100, "device_step_ns": 95, "first": 1, "profiled": 0}
    row |= {name: n + 1 for n, name in enumerate((*names, "optimizer_steps"))}
    old = row | {"device_ns": device_ns}
    absent = dict.fromkeys(("forwards", "unused_forward_ns", "samples", "inputs", "tokens"), -1)
    reading = read_steps(write(tmp_path / "steps.jsonl", old))
    assert reading.tables["steps"].to_dict("records") == [row | absent]
    assert reading.warnings == ()
    frame = read_steps(write(tmp_path / "steps.jsonl", old | {"steps": 3})).tables["steps"]
    assert (frame["step"].to_list(), frame["device_step_ns"].sum()) == ([7, 8, 9], 95)


def test_steps_that_share_a_line_are_a_row_each_and_lose_nothing(tmp_path: Path) -> None:
    sums = {"dur_ns": 100, "fetch_ns": 7, "device_step_ns": 101, "fetches": 3, "optimizer_steps": 1}
    shared = line(5, start_ns=1000, lead_ns=-1, profiled=1, steps=3, **sums)
    path = write(tmp_path / "steps.jsonl", line(4, start_ns=900, dur_ns=100), shared, line(8, start_ns=1100))
    frame = read_steps(path).tables["steps"]
    assert frame["step"].to_list() == [4, 5, 6, 7, 8]
    assert frame["start_ns"].to_list() == [900, 1000, 1033, 1066, 1100]
    three = frame.iloc[1:4]
    assert {name: int(three[name].sum()) for name in sums} == sums
    assert (three["start_ns"] + three["dur_ns"]).to_list() == [1033, 1066, 1100]
    for name, each in (("fetches", 1), ("lead_ns", -1), ("profiled", 1)):
        assert three[name].to_list() == [each] * 3


def test_a_step_that_was_saved_before_its_device_time_was_known_counts_once(tmp_path: Path) -> None:
    def at(step: int, device: int, **more: int) -> dict[str, int]:
        return {"step": step, "start_ns": 100 * step, "dur_ns": 100, "device_step_ns": device, **more}

    early = [at(0, 50), *(at(step, -1, outstanding=1) for step in (1, 2))]
    for later, device in (
        ([], [50, -1, -1]),  # the job hung there, and was killed
        ([at(1, 51), at(2, 52), at(3, -1, outstanding=1)], [50, 51, 52, -1]),  # it went on, and a third one hangs
        ([at(1, 103, steps=2, dur_ns=200)], [50, 52, 51]),  # short steps share a line
    ):
        frame = read_steps(write(tmp_path / "steps.jsonl", *early, *later)).tables["steps"]
        assert sorted(frame["device_step_ns"]) == sorted(device)
        assert frame["step"].to_list() == list(range(len(device)))


# Samples.


@pytest.mark.parametrize("name", read_as("samples"))
def test_each_number_of_a_sample_is_a_row_and_the_clocks_are_none(tmp_path: Path, name: str) -> None:
    source = read_as("samples")[name]
    text = '{"at_ns":%d,"perf_ns":5,"power_w":%s,"energy_j":7}'
    odd = '{"at_ns":30,"power_w":"3","busy":true,"cores":[1]}'
    bad = ['{"power_w":3}', '{"at_ns":-1}', "nonsense"]
    path = write(tmp_path / source.files[0], text % (10, "1.5"), *bad, text % (20, "null"), odd, '{"at_ns":30,"po')
    path.write_bytes(path.read_bytes()[:-1])
    reading = source.read(path)
    # Not measured is no row: neither a null, nor a word, nor a zero in its place.
    assert reading.tables["samples"][["source", "metric", "at_ns", "value"]].to_numpy().tolist() == [
        *([name, "power_w", 10, 1.5], [name, "energy_j", 10, 7.0], [name, "energy_j", 20, 7.0])
    ]
    assert reading.warnings == (f"{source.files[0]}: 3 malformed lines are left out",)
    with pytest.raises(DlprofError, match="none of its lines"):
        source.read(write(path, "a,b", "1,2", "3,4"))
    path.write_text("")
    assert len(source.read(path).tables["samples"]) == 0


def test_the_cores_are_counted_and_the_busiest_is_found(tmp_path: Path) -> None:
    first = '{"at_ns":10,"perf_ns":1,"cpu_share":0.5,"core_percent":[100,3,91,90]}'
    path = write(tmp_path / "host.jsonl", first, '{"at_ns":20,"core_percent":[]}')
    frame = read_as("samples")["host"].read(path).tables["samples"]
    shares = {"cpu_share": 0.5, "busiest_core_share": 1.0}
    expected = {"cores": 4.0, "cpu_cores": 2.84, "busy_cores": 2.0} | shares
    assert dict(zip(frame["metric"], frame["value"], strict=True)) == expected


# Lines of functions.

PIECE = {"role": "main", "function": "data:f", "file": "data.py", "first": 3, "lines": [[4, 2, 100], [5, 1, 50]]}
SOURCE = "def f():\n    a = 1\n    return a\n    # never\n"


def test_pieces_add_up_and_lines_that_never_ran_are_there(tmp_path: Path) -> None:
    worker = PIECE | {"role": "worker", "lines": [[4, 7, 1]]}
    path = write(tmp_path / "lines.jsonl", PIECE | {"source": SOURCE}, worker, PIECE | {"lines": [[4, 1, 10]]}, "{")
    path.write_bytes(path.read_bytes()[:-1])
    reading = read_lines(path)
    counts = {"main": [(0, 0), (3, 110), (1, 50), (0, 0)], "worker": [(0, 0), (7, 1), (0, 0), (0, 0)]}
    assert reading.tables["lines"][["role", "line", "hits", "dur_ns", "source"]].to_numpy().tolist() == [
        [role, 3 + n, *count, text]
        for role, of in counts.items()
        for n, (count, text) in enumerate(zip(of, SOURCE.splitlines(), strict=True))
    ]
    assert reading.warnings == ()
    path.write_text("")
    assert len(read_lines(path).tables["lines"]) == 0
    with pytest.raises(DlprofError, match="not a log of lines"):
        read_lines(write(path, "one", "two"))


@pytest.mark.parametrize("figure", [2**63, -1, 2**62])
@pytest.mark.parametrize("key", ["first", "lines"])
def test_a_piece_of_impossible_counts_is_left_out(figure: int, key: str, tmp_path: Path) -> None:
    bad = PIECE | {key: [[4, figure, 1]] if key == "lines" else figure, "source": SOURCE}
    reading = read_lines(write(tmp_path / "lines.jsonl", "nonsense", PIECE, bad, '{"role": 1}', PIECE))
    table = reading.tables["lines"]
    assert (table["hits"].tolist(), set(table["source"])) == ([4, 2], {""})
    assert reading.warnings == ("lines.jsonl: 3 malformed lines are left out",)


# Python stacks.

LIB = "/v/lib/python3.11/site-packages/torch"
RANK = 'process 7:"python -c a;b "x" train.py";'
WORKER = RANK + 'process 9:"python; thread (1): x";'
MAIN = "thread (7): MainThread;"
MODULE = f"Module._call_impl ({LIB}/nn/modules/module.py:3)"
STEP_OF = f"Optimizer.profile_hook_step.<locals>.wrapper ({LIB}/optim/optimizer.py:5)"
OURS = "__next__ (/x/dlprof/record/hooks.py:4);begin_fetch (/x/dlprof/record/step_clock.py:4)"


def packed(path: Path, *members: str) -> Path:
    header = "#" + json.dumps({"start_ns": 0, "end_ns": 2 * 10**9, "rate": 47}) + "\n"
    path.write_bytes(b"".join(gzip.compress((header + text).encode()) for text in members))
    return path


def rows(path: Path) -> list[tuple[str, str, str, str, int]]:
    return sorted(tuple(row)[:5] for row in stacks.read(path).tables["stacks"].to_numpy())


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ("main (train.py:3)", "rest"),
        (f"main (t.py:3);_BaseDataLoaderIter.__next__ ({LIB}/utils/data/dataloader.py:7);{MODULE}", "fetch"),
        (f"main (train.py:3);__iter__ ({LIB}/utils/data/dataloader.py:9)", "fetch"),
        (f"main (train.py:3);{MODULE};backward ({LIB}/autograd/__init__.py:1)", "forward"),
        (f"Tensor.backward ({LIB}/_tensor.py:1);{MODULE}", "backward"),
        (f"{STEP_OF};step (mine.py:4)", "optimizer"),
        (f"{STEP_OF};Adam.step ({LIB}/optim/adam.py:9);_multi ({LIB}/optim/adam.py:60)", "optimizer"),
        (f"{STEP_OF};Adam.step ({LIB}/optim/adam.py:9);closure (train.py:4)", "rest"),
        (f"{STEP_OF};Adam.step ({LIB}/optim/adam.py:9);closure (train.py:4);{MODULE}", "forward"),
        (f"Optimizer.zero_grad ({LIB}/optim/optimizer.py:5)", "rest"),
        ("Net.backward (train.py:4);step (train.py:9)", "rest"),
    ],
)
def test_the_phase_is_what_the_recorder_would_have_counted(frames: str, phase: str, tmp_path: Path) -> None:
    path = packed(tmp_path / "stacks.txt.gz", f"{RANK}{MAIN}{frames} 3\n")
    assert rows(path) == [("main", "MainThread", phase, frames, 3)]


@pytest.mark.parametrize(
    "last", ["steps_due (/x/dlprof/record/recorder.py:9)", "go (/x/dlprof/record/device/kineto.py:4)"]
)
def test_the_recorders_own_work_is_no_part_of_the_job(last: str, tmp_path: Path) -> None:
    work = f"main (train.py:3);next (/x/dlprof/record/hooks.py:4);{last};p ({LIB}/profiler/p.py:1)"
    user = f"f (/home/dlprof/train.py:4);prof.step ({LIB}/profiler/profiler.py:4)"
    text = (
        f"{RANK}{MAIN}{work} 3\n{RANK}{MAIN}main (train.py:3);call (/x/dlprof/record/collectors/flops.py:1);{user} 3\n"
    )
    kept = f"main (train.py:3);{user}"
    assert rows(packed(tmp_path / "stacks.txt.gz", text)) == [("main", "MainThread", "rest", kept, 3)]


def test_bursts_add_up_each_stack_is_somebodys_and_a_cut_one_loses_nothing_before(tmp_path: Path) -> None:
    inner = f"_worker_loop ({LIB}/utils/data/_utils/worker.py:5);decode (data.py:7)"
    first = (
        f"{RANK}{MAIN}main (train.py:3);{OURS};f (train.py:8) 2\n{RANK}thread (8): QueueFeederThread;run (q.py:1) 5\n"
        f"{WORKER}{MAIN}main (train.py:3);{inner} 4\n{WORKER}thread (9): pin;run (q.py:1) 6\n"
        f"{WORKER}{MAIN}child (train.py:3) 1\n"
    )
    second = f"{WORKER}{MAIN}{inner} 1\n{RANK}{MAIN}main (train.py:3);f (train.py:8) 1\n"
    path = packed(tmp_path / "stacks.txt.gz", first, second)
    assert rows(path) == [
        ("main", "MainThread", "rest", "main (train.py:3);f (train.py:8)", 3),
        ("other", "MainThread", "", "child (train.py:3)", 1),
        ("other", "pin", "", "run (q.py:1)", 6),
        ("thread", "QueueFeederThread", "", "run (q.py:1)", 5),
        ("worker", "MainThread", "", inner, 5),
    ]
    assert (stacks.read(path).facts, stacks.read(path).warnings) == ({"stacks": {"bursts": 2, "seconds": 4.0}}, ())
    whole = packed(path, first).read_bytes()
    both = packed(path, first, second).read_bytes()
    for cut in range(len(whole), len(both), 5):
        path.write_bytes(both[:cut])
        reading = stacks.read(path)
        assert (18 <= reading.tables["stacks"]["samples"].sum() <= 20, reading.warnings) == (True, ())


@pytest.mark.parametrize("figure", ["1e999", "-1", "9" * 400, "null", "[" * 100_000, '"\\ud800"'])
def test_a_burst_of_impossible_times_is_left_out_and_its_stacks_stay(figure: str, tmp_path: Path) -> None:
    burst = '#{"start_ns": 0, "end_ns": ' + figure + "}\n"
    text = f"{burst}{RANK}{MAIN}main (train.py:3) 2\n{RANK}{MAIN}main (train.py:4) 1\n"
    path = tmp_path / "stacks.part"  # nobody has packed and appended it
    path.write_text(text)
    reading = stacks.read(path)
    assert (reading.tables["stacks"]["samples"].tolist(), reading.facts) == ([2, 1], {})
    assert reading.warnings == ("stacks.part: 1 malformed lines are left out",)
    path.write_text("")
    assert len(stacks.read(path).tables["stacks"]) == 0
    with pytest.raises(DlprofError, match=r"no stacks of py-spy"):
        stacks.read(write(path, "one", "two"))


# overrides.json and held.json.

ENTRY = {"value": 4, "applied": 3, "before": [0, 2], "places": [["a.py", 1, "f"], ["b.py", 9, "g"]], "error": None}
OTHER = {"value": True, "applied": 0, "before": [], "places": [], "error": "sparse"}
HELD = row("parameter", "block.0", 400)


def as_json(name: str, folder: Path, data: Any) -> tuple[Reading, list[dict[str, Any]]]:
    (folder / f"{name}.json").write_text(json.dumps(data))
    reading = {"held": facts.read_held, "overrides": facts.read_overrides}[name](folder / f"{name}.json")
    rows: Any = schema.check(name, reading.tables[name]).astype(object).to_dict("records")
    return reading, rows


@pytest.mark.parametrize(
    ("changed", "applied", "lines"),
    [
        ({}, 3, [1, 9]),
        *(({"applied": odd}, 0, [1, 9]) for odd in ("many", -3, True)),
        ({"before": {"a": 1}}, 3, [1, 9]),
        ({"places": []}, 3, [-1]),
        ({"places": [["a.py", "1", "f"], "b", [1, 2, 3], ["a.py", 1], ["a.py", 2**70, "f"]]}, 3, None),
        ({"error": ["no"]}, 3, [1, 9]),
    ],
)
def test_an_override_is_a_row_a_place_and_odd_parts_count_as_absent(
    changed: dict[str, Any], applied: int, lines: list[int] | None, tmp_path: Path
) -> None:
    data = {"loader.num_workers": ENTRY | changed, "optimizer.fused": OTHER, "a": 1, "b": {"applied": 1}}
    reading, (*rows, last) = as_json("overrides", tmp_path, data)
    assert reading.warnings == ("overrides.json: 2 entries of another kind are left out",)
    assert list(last.values()) == ["optimizer.fused", "True", "", 0, "", -1, "", "sparse"]
    if not changed:
        assert list(rows[0].values()) == ["loader.num_workers", "4", "0, 2", 3, "a.py", 1, "f", ""]
    found = [list(row.values()) for row in rows]
    assert {values[3] for values in found} == {applied} or lines is None
    assert {values[5] for values in found} <= set(lines or (-1, 1, 9))
    assert as_json("overrides", tmp_path, {})[1] == []


def test_held_is_a_row_a_part_of_a_module_and_facts_beside_them(tmp_path: Path) -> None:
    beside = {"step": 9, "state": "counted", "optimizers": [{"class": "Adam", "state": []}]}
    written = [HELD, row("activation", "", 7, dtype="bfloat16")]
    reading, found = as_json("held", tmp_path, beside | {"rows": written})
    assert (found, reading.facts, reading.warnings) == (written, {"held": beside}, ())
    odd = {
        "step": "9",
        "moments": [{"moment": 3, "device": "cpu"}],
        "process": [],
        "rows": [HELD | {"module": "m" * 9999}],
    }
    reading, found = as_json("held", tmp_path, odd)
    assert (found[0]["module"], reading.facts) == ("m" * 400, {"held": {"moments": [{"device": "cpu"}]}})


@pytest.mark.parametrize(
    "changed",
    [{"bytes": -1}, {"bytes": 2**70}, {"bytes": 1.5}, {"tensors": True}, {"part": 3}, {"module": None}, {"dtype": []}],
)
def test_odd_rows_of_held_are_left_out_with_a_warning(changed: dict[str, Any], tmp_path: Path) -> None:
    reading, found = as_json("held", tmp_path, {"rows": [HELD | changed, HELD, {}, 4]})
    assert [one["bytes"] for one in found] == [400]
    assert any("held.json: 2 rows of another kind" in text for text in reading.warnings)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"rows": 3}', "1" * 5000])
def test_broken_json_files_are_one_line(text: str, tmp_path: Path) -> None:
    for name, read_it in (("overrides", facts.read_overrides), ("held", facts.read_held), ("facts", facts.read)):
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        if text == '{"rows": 3}' and name != "held":
            continue
        with pytest.raises(DlprofError, match=rf"{path.stem}\.json[^\n]*$"):
            read_it(path)


# facts.json.

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch, in DataLoader(TensorDataset(torch.randn(12, 3, 8, 8)), batch_size=4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch).float().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.long
def test_what_the_recorder_writes_is_of_the_declared_kinds(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    jobs.record(tmp_path / "train.py", folder=tmp_path / "run", options=["--no-trace"])
    rank, run = tmp_path / "run" / "ranks" / "00000" / "facts.json", tmp_path / "run" / "run.json"
    for path, shape in ((rank, facts.RANK), (run, facts.RUN)):
        written, reading = json.loads(path.read_text()), facts.read(path, shape)
        assert (reading.facts, reading.warnings) == (written, ())
        assert set(shape) <= set(written)
    assert all(facts.read(rank).facts[name] for name in ("loaders", "models", "optimizers"))


@pytest.mark.parametrize(
    ("written", "kept", "left_out"),
    [
        *(({"world_size": odd}, {}, "world_size") for odd in ("8", -1, 2**63, True, 8.0)),
        ({"host": ["node"]}, {}, "host"),
        ({"grad_scaler": 1}, {}, "grad_scaler"),
        ({"env": []}, {}, "env"),
        ({"loaders": {}}, {}, "loaders"),
        ({"later": [[[[1]]]]}, {}, "later"),
        (
            {"loaders": [{"role": "train", "num_workers": "4"}, 5], "device": {"name": 7, "type": "cuda"}},
            {"loaders": [{"role": "train"}], "device": {"type": "cuda"}},
            "loaders[0].num_workers, loaders[1], device.name",
        ),
        (
            {"models": [{"parameters": "9"}, {"parameters": 3, "later": {"a": [1, 2.5]}}, 5], "cpu": {"count": True}},
            {"models": [{}, {"parameters": 3, "later": {"a": [1, 2.5]}}], "cpu": {}},
            "models[0].parameters, models[2], cpu.count",
        ),
        # Unknown values and facts of a later dlprof pass.
        ({"host": None, "power": {"watts": 1.5}}, {"host": None, "power": {"watts": 1.5}}, ""),
        *(
            ({"env": {"A": odd}, "later": odd}, {"env": {}}, "env.A, later")
            for odd in (float("nan"), float("inf"), 10**30)
        ),
    ],
)
def test_of_facts_only_what_does_not_fit_is_left_out_and_named(
    tmp_path: Path, written: dict[str, Any], kept: dict[str, Any], left_out: str
) -> None:
    (tmp_path / "facts.json").write_text(json.dumps(written | {"pid": 4711}))
    reading = facts.read(tmp_path / "facts.json")
    assert reading.facts == kept | {"pid": 4711}
    assert [text.rpartition(": ")[2] for text in reading.warnings] == [left_out] * bool(left_out)


def test_many_facts_that_do_not_fit_are_one_short_line(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(json.dumps({name: [[]] for name in facts.RANK}))
    (words,) = facts.read(tmp_path / "facts.json").warnings
    assert (words[-2:], len(words) < 200) == (" …", True)


# Limits.


def test_limits_hold_unless_they_are_lifted_and_each_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(limits.NO_LIMITS, raising=False)
    assert limits.limit(5) == 5
    monkeypatch.setenv(limits.NO_LIMITS, "1")
    assert limits.limit(5) > limits.MOST_ROWS
    package = Path(limits.__file__).parents[1]
    code = "".join(path.read_text() for path in package.rglob("*.py"))
    assert [name for name in vars(limits) if name.isupper() and code.count(name) < 2] == []


def test_no_more_steps_are_read_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_ROWS", 1_000)
    # One line may claim to be as many steps as it likes.
    log = write(tmp_path / "steps.jsonl", STEP, {"step": 1, "start_ns": 2, "dur_ns": 1, "steps": 10**15})
    reading = read_steps(log)
    assert len(reading.tables["steps"]) == 1
    assert any("more than 1,000 steps" in warning for warning in reading.warnings)
    write(log, *({"step": n, "start_ns": n, "dur_ns": 1} for n in range(3_000)))
    assert len(read_steps(log).tables["steps"]) == 1_000


def test_a_file_of_one_endless_line_is_not_read_to_its_end(tmp_path: Path) -> None:
    sparse = write(tmp_path / "steps.jsonl", STEP)
    os.truncate(sparse, 8 << 30)
    with opening.open_file(sparse) as file:
        found = [line for some in opening.lines_of(file) for line in some]
        assert file.tell() < 64 << 20
    assert found == [json.dumps(STEP).encode(), opening.NO_LINE]
    assert len(read_steps(sparse).tables["steps"]) == 1
    with pytest.raises(DlprofError, match="larger than 64 MB"):
        opening.read_file(sparse)
