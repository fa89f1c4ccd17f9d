"""The logs whose lines are rows of a table: whole, cut off, odd, and of another dlprof or PyTorch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.read.logs import samples
from dlprof.read.sources import SOURCES, Reading, Source
from dlprof.schema import LOADING, MEMORY


def read_as(kind: str) -> list[Source]:
    """List the sources that a function of logs.py reads: "rows" or "samples"."""
    return [s for s in SOURCES if isinstance(s.read, partial) and s.read.args[:2] == ("logs", kind)]


LOGS = {s.name: s for s in read_as("rows")}
SAMPLERS = {s.name: s for s in read_as("samples")}
LINE = '{"at_ns":%d,"perf_ns":5,"power_w":%s,"energy_j":7}\n'

CALL = {"step": 3, "action": "schedule", "start_ns": 5, "dur_ns": 30, "busy_ns": 20}
CHUNK = {"step": 3, "action": "forward", "stage": 1, "microbatch": 0, "start_ns": 7, "dur_ns": 20}
PAUSE = {"kind": "garbage_collection", "start_ns": 5, "dur_ns": 3, "step": 1, "generation": 2, "path": None}
SAVE = {"kind": "checkpoint", "start_ns": 9, "dur_ns": 4, "step": 2, "generation": None, "path": "/d/m.pt"}


def write(folder: Path, table: str, *lines: dict[str, Any] | str) -> Path:
    path = folder / LOGS[table].files[0]
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def read(folder: Path, table: str, *lines: dict[str, Any] | str) -> Reading:
    return LOGS[table].read(write(folder, table, *lines))


def test_fetches_of_several_workers_are_in_order_and_one_that_a_kill_cut_is_told(tmp_path: Path) -> None:
    of = [{"worker": w, "pid": 70 + w, "start_ns": start, "dur_ns": 4, "count": 1} for w, start in ((1, 9), (0, 5))]
    reading = read(tmp_path, "fetches", of[0], '{"worker": 0, "pi' + json.dumps(of[1]), of[1])
    assert reading.tables["loading"][["pid", "kind"]].to_numpy().tolist() == [[70, "fetch"], [71, "fetch"]]
    assert reading.tables["loading"]["cpu_ns"].to_list() == [-1, -1]
    assert reading.warnings == ("fetches.jsonl: 1 malformed lines are left out",)


def test_what_does_not_apply_to_a_kind_of_loading_is_marked(tmp_path: Path) -> None:
    start = {"kind": "start", "start_ns": 5, "dur_ns": 3, "count": 1, "step": 0, "loader": 0, "workers": "7 8"}
    batch = {"kind": "batch", "start_ns": 9, "dur_ns": 4, "count": 2, "step": 1, "loader": 0, "empty": 1, "ready": 3}
    none: dict[str, Any] = {**dict.fromkeys(LOADING, -1), "workers": ""}
    assert read(tmp_path, "loading", batch, start).tables["loading"].to_dict("records") == [
        {**none, **start},
        {**none, **batch},
    ]


def test_memory_is_in_order_of_time_and_what_another_pytorch_does_not_know_is_marked(tmp_path: Path) -> None:
    new = dict(zip(MEMORY, range(11), strict=True))
    old = {**new, "at_ns": 9, "device_allocs": None}
    del old["ooms"]
    path = write(tmp_path, "memory", old, new)
    path.write_text(path.read_text() + '{"at_ns": 5, "step"')
    reading = LOGS["memory"].read(path)
    assert reading.tables["memory"].to_dict("records") == [new, {**old, "device_allocs": -1, "ooms": -1}]
    assert reading.warnings == ()


def test_calls_and_chunks_are_in_order_of_time(tmp_path: Path) -> None:
    reading = read(tmp_path, "pipeline", CHUNK, {**CALL, "new": 1})
    assert reading.tables["chunks"].to_dict("records") == [
        {**CALL, "stage": -1, "microbatch": -1},
        {**CHUNK, "busy_ns": -1},
    ]
    assert reading.warnings == ()


def test_a_cut_last_chunk_is_dropped_without_a_word_and_a_bad_one_with(tmp_path: Path) -> None:
    path = write(tmp_path, "pipeline", CALL, {**CHUNK, "dur_ns": -1}, CHUNK)
    path.write_bytes(path.read_bytes()[:-9])
    reading = LOGS["pipeline"].read(path)
    assert reading.tables["chunks"]["action"].to_list() == ["schedule"]
    assert reading.warnings == ("chunks.jsonl: 1 malformed lines are left out",)


def test_stalls_are_in_order_of_time_and_what_does_not_apply_is_marked(tmp_path: Path) -> None:
    reading = read(tmp_path, "stalls", {**SAVE, "phase": "optimizer", "new": 1}, "", PAUSE)
    assert reading.tables["stalls"].to_dict("records") == [
        {**PAUSE, "path": "", "phase": "rest", "reason": "", "count": 1},
        {**SAVE, "generation": -1, "phase": "optimizer", "reason": "", "count": 1},
    ]
    assert reading.warnings == ()


@pytest.mark.parametrize(("count", "stands_for"), [(None, 1), (-1, 1), (0, 1), (1, 1), (9, 9)])
def test_a_stall_stands_for_one_at_least(tmp_path: Path, count: int | None, stands_for: int) -> None:
    assert read(tmp_path, "stalls", {**SAVE, "count": count}).tables["stalls"]["count"].to_list() == [stands_for]


def test_a_cut_last_stall_is_dropped_without_a_word_at_any_byte(tmp_path: Path) -> None:
    path = write(tmp_path, "stalls", PAUSE, SAVE)
    data = path.read_bytes()
    for cut in range(data.index(b"\n") + 1, len(data) - 1):
        path.write_bytes(data[:cut])
        reading = LOGS["stalls"].read(path)
        assert reading.tables["stalls"]["step"].to_list() == [1]
        assert reading.warnings == ()


@pytest.mark.parametrize("bad", ["{", "[1]", {**SAVE, "dur_ns": -1}, {**SAVE, "path": 7}, {"kind": "checkpoint"}])
def test_a_bad_stall_in_the_middle_is_dropped_with_a_word(tmp_path: Path, bad: Any) -> None:
    reading = read(tmp_path, "stalls", PAUSE, bad, SAVE)
    assert reading.tables["stalls"]["step"].to_list() == [1, 2]
    assert reading.warnings == ("stalls.jsonl: 1 malformed lines are left out",)


def test_every_log_is_tested() -> None:
    assert set(LOGS) >= {"fetches", "loading", "memory", "pipeline", "stalls"}
    assert set(SAMPLERS) >= {"gpu", "host", "processes"}


@pytest.mark.parametrize("table", LOGS)
def test_no_line_is_a_job_in_which_nothing_of_it_happened(tmp_path: Path, table: str) -> None:
    reading = read(tmp_path, table)
    assert (len(reading.tables[LOGS[table].tables[0]]), reading.warnings) == (0, ())


@pytest.mark.parametrize("table", LOGS)
@pytest.mark.parametrize("lines", [("a", "b"), ("1", "2"), ('{"kind": "batch"}', '{"kind": "batch"}')])
def test_what_is_no_such_log_is_refused(tmp_path: Path, table: str, lines: tuple[str, ...]) -> None:
    with pytest.raises(DlprofError, match=f"not a log of {LOGS[table].tables[0]}: none of its lines is one"):
        read(tmp_path, table, *lines)
    with pytest.raises(DlprofError, match="no such file"):
        LOGS[table].read(tmp_path / "none.jsonl")


def test_each_number_is_a_row_and_the_clocks_are_none(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    path.write_text(LINE % (10, "1.5") + LINE % (20, "null") + '{"at_ns":30,"power_w":"3","busy":true,"cores":[1]}\n')
    reading = samples(path, "gpu")
    frame = reading.tables["samples"]
    rows = [(m, int(at), float(v)) for m, at, v in zip(frame["metric"], frame["at_ns"], frame["value"], strict=True)]
    # Not measured is no row: neither a null, nor a word, nor a zero in its place.
    assert rows == [("power_w", 10, 1.5), ("energy_j", 10, 7.0), ("energy_j", 20, 7.0)]
    assert set(frame["source"]) == {"gpu"}
    assert reading.warnings == ()


def test_a_cut_last_line_is_dropped_and_other_bad_ones_are_told_of(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    path.write_text(LINE % (10, "1") + '{"power_w":3}\n{"at_ns":-1}\nnonsense\n' + LINE % (20, "2") + '{"at_ns":30,"po')
    reading = samples(path, "gpu")
    frame = reading.tables["samples"]
    assert list(frame.loc[frame["metric"] == "power_w", "at_ns"]) == [10, 20]
    assert reading.warnings == ("gpu.jsonl: 3 malformed lines are left out",)


def test_a_file_that_is_no_log_of_samples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    path.write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(DlprofError, match="none of its lines"):
        samples(path, "gpu")
    path.write_text("")
    assert len(samples(path, "gpu").tables["samples"]) == 0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_samples_say_whose_they_are(tmp_path: Path, sampler: str) -> None:
    path = tmp_path / SAMPLERS[sampler].files[0]
    path.write_text('{"at_ns":10,"perf_ns":1,"power_w":612.3,"clock_reasons_bits":4}\n')
    frame = SAMPLERS[sampler].read(path).tables["samples"]
    assert set(frame["source"]) == {sampler}
    assert dict(zip(frame["metric"], frame["value"], strict=True)) == {"power_w": 612.3, "clock_reasons_bits": 4.0}


def test_the_cores_are_counted_and_the_busiest_is_told(tmp_path: Path) -> None:
    (tmp_path / "host.jsonl").write_text(
        '{"at_ns":10,"perf_ns":1,"cpu_share":0.5,"core_percent":[100,3,91,90]}\n{"at_ns":20,"core_percent":[]}\n'
    )
    frame = SAMPLERS["host"].read(tmp_path / "host.jsonl").tables["samples"]
    assert set(frame["source"]) == {"host"}
    assert dict(zip(frame["metric"], frame["value"], strict=True)) == {
        "cpu_share": 0.5,
        "cores": 4.0,
        "cpu_cores": 2.84,
        "busy_cores": 2.0,
        "busiest_core_share": 1.0,
    }
