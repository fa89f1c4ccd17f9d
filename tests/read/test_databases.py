"""Exports of Nsight Systems and files of rocprofv3 give what a torch-profiler trace gives of the same job."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.timeline.device import device_time
from dlprof.commands.report import analyse
from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.columnar import recurring
from dlprof.read.columnar.database import MISSING, is_sqlite, open_database
from dlprof.read.columnar.rows import Ranges, Rows, annotation_rows, numbered, spans_of
from dlprof.read.formats import Head, format_named, recognised
from dlprof.read.kineto import torch_trace
from dlprof.read.nsys import export
from dlprof.read.nsys import format as of_nsys
from dlprof.read.nsys.format import Process, of_process, piece_of, processes_of
from dlprof.read.rocprof import process
from dlprof.read.rocprof.process import read_csv, read_database, read_json
from dlprof.read.run import open_run
from dlprof.read.sources import Reading
from dlprof.result import Result
from simulator import nsys
from tests.fixtures import dialects, exports, rocpd
from tests.fixtures.exports import HOST, PID, kernel, mark, text
from tests.fixtures.places import GOLDEN, TRACES
from tests.fixtures.runs import measured

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
K = [text(1, "k")]
SECOND = HOST | 5 << 24


def known(path: Path) -> str | None:
    found = recognised(Head(path))
    return found[0].name if found else None


def column(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


# SQLite files from strangers.


def starts(path: Path) -> tuple[list[int], list[str]]:
    with open_database(path) as database:
        return database.integers("T", ["start"])["start"].tolist(), list(database.damage)


def test_columns_are_read_by_name_and_absent_ones_are_missing(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"Start": 5, "end": None, "name": "a"}, {"Start": 2**63 - 1, "end": 2.5, "name": "b"}]
    threads = [{"globalTid": PID | 1, "n": 1}, {"globalTid": HOST | 1, "n": 2}]
    with open_database(exports.tables(tmp_path / "x", T=rows, THREADS=threads)) as database:
        found = database.integers("T", ["start", "end", "other", "other|start", "name"])
        assert {name: values.tolist() for name, values in found.items()} == {
            "start": [5, 2**63 - 1],
            "end": [MISSING, 2],
            "other": [MISSING] * 2,
            "other|start": [5, 2**63 - 1],
            "name": [0, 0],  # text is no number
        }
        assert len(database.integers("none", ["start"])["start"]) == 0
        assert database.texts("T", "start", "name", [5]) == {5: "a"}
        mine = database.integers("THREADS", ["n"], *of_process(database, "THREADS", PID))
        assert (mine["n"].tolist(), database.damage) == ([1], [])


def test_views_virtual_tables_and_generated_columns_are_not_read(tmp_path: Path) -> None:
    path = exports.tables(tmp_path / "x", T=[{"start": 1}])
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE VIEW V AS SELECT randomblob(1000000000) AS start")
        connection.execute('CREATE TABLE G (start, "end" AS (zeroblob(1000000000)))')
        connection.execute("INSERT INTO G (start) VALUES (3)")
        connection.execute("CREATE VIRTUAL TABLE F USING fts5(start)")
        connection.execute("CREATE TRIGGER R AFTER INSERT ON T BEGIN DELETE FROM T; END")
    connection.close()
    before = path.read_bytes()
    with open_database(path) as database:
        assert {"T", "G"} <= database.tables
        assert not {"V", "F"} & database.tables
        assert database.integers("G", ["start", "end"])["end"].tolist() == [MISSING]
        for sql in ("DELETE FROM T", "ATTACH 'y' AS y", "PRAGMA journal_mode=WAL", "SELECT load_extension('z')"):
            with pytest.raises(sqlite3.Error):
                database._connection.execute(sql).fetchall()
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["x"]  # no journal, no -wal, no -shm


def test_a_file_that_is_cut_off_or_overwritten_gives_what_can_be_read(tmp_path: Path) -> None:
    whole = exports.tables(tmp_path / "x", T=[{"start": n, "text": f"{n:0100}"} for n in range(5_000)]).read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    found, damage = starts(tmp_path / "cut")
    held = [number for number in found if number != MISSING]  # of the page that was cut, rows may be empty
    assert (held, held[:100], len(damage)) == (sorted(set(held)), list(range(100)), 1)
    assert 100 < len(held) < 5_000
    (tmp_path / "overwritten").write_bytes(whole[:200_000] + b"\xff" * 100_000 + whole[300_000:])
    found, _ = starts(tmp_path / "overwritten")
    assert found[:100] == list(range(100))
    assert set(found) <= {*range(5_000), MISSING}
    for size in (0, 15, 16, 100, 4096):
        (tmp_path / "head").write_bytes(whole[:size])
        with suppress(DlprofError):
            assert starts(tmp_path / "head")[0] == []
    (tmp_path / "x").write_text("SQLite format 2")
    assert not is_sqlite(tmp_path / "x")
    with pytest.raises(DlprofError, match="not a SQLite file"):
        starts(tmp_path / "x")


def test_packed_rows_and_steps_of_sqlite_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, packed = exports.tables(tmp_path / "x", T=[{"start": n} for n in range(5_000)]), tmp_path / "x.gz"
    data = gzip.compress(path.read_bytes())
    packed.write_bytes(data[:-3_000])
    assert any("cut off" in line for line in starts(packed)[1])
    packed.write_bytes(data)
    assert (is_sqlite(packed), len(starts(packed)[0])) == (True, 5_000)
    monkeypatch.setattr(limits, "LEAST_UNPACKED", 1_000)
    monkeypatch.setattr(limits, "MOST_UNPACKED", 1)
    with pytest.raises(DlprofError, match="--no-limits"):
        starts(packed)
    with monkeypatch.context() as patch:
        patch.setattr("dlprof.read.columnar.database.MOST_ROWS", 10)
        found, damage = starts(path)
        assert (len(found), len(damage)) == (10, 1)
    for name, value in (("_STEPS_LEAST", 1_000), ("_STEPS_A_BYTE", 0), ("_STEPS_AT_ONCE", 1_000)):
        monkeypatch.setattr(f"dlprof.read.columnar.database.{name}", value)
    found, damage = starts(path)
    assert (len(found) < 5_000, "interrupted" in damage[0]) == (True, True)


# Rows of spans.


def kernels(device: int, *times: tuple[int, int]) -> Rows:
    """Return kernels on stream 7 of a device, by start and end."""
    n = len(times)
    begin, end = (column(*(time[i] for time in times)) for i in (0, 1))
    return Rows(
        ["gemm"], ["kernel"], column(*[0] * n), begin, end, column(*[device] * n), column(*[7] * n), np.arange(n) + 1
    )


def test_spans_are_in_order_the_longer_first_and_without_unusable_times() -> None:
    named = Ranges(["step 1", "aten::mm"], [False, True], column(0, 1), column(5, 5), column(90, 20), column(3, 3))
    bad = kernels(0, (MISSING, 5), (9, 3), (2**62, 2**62 + 1), (10, 12))
    spans, lost = spans_of([kernels(1, (40, 50), (10, 20)), bad, annotation_rows(named)], main=1, base=100)
    found = spans.astype({"lane": str, "kind": str, "name": str})
    assert found[["lane", "kind", "name", "start_ns", "dur_ns", "launch"]].to_numpy().tolist() == [
        ["host:3", "annotation", "step 1", 105, 85, -1],
        ["host:3", "op", "aten::mm", 105, 15, -1],
        ["device:7", "kernel", "gemm", 110, 10, 2],
        ["device0:7", "kernel", "gemm", 110, 2, 4],
        ["device:7", "kernel", "gemm", 140, 10, 1],
    ]
    assert lost == 3
    nothing, lost = spans_of([kernels(0, (9, 3))], main=0)
    assert (len(nothing), lost) == (0, 1)
    names, of = numbered(column(8, 2, 8, 5, 9), {2: "a", 8: "b", 9: "a"}, "unknown")
    assert ([names[i] for i in of.tolist()], len(names)) == (["b", "a", "b", "unknown", "a"], 3)
    assert numbered(column(), {}, "unknown")[0] == []


# Steps that recur: named, or between runs of an optimizer.


def ranged(*rows: tuple[str, int, int]) -> Ranges:
    """Return ranges of a name, a start and an end, on one thread."""
    names = list(dict.fromkeys(name for name, _, _ in rows))
    ordered = sorted(rows, key=lambda row: (row[1], -row[2]))
    number, start, end = (
        [f(row) for row in ordered] for f in (lambda r: names.index(r[0]), lambda r: r[1], lambda r: r[2])
    )
    return Ranges(names, [False] * len(names), column(*number), column(*start), column(*end), np.full(len(rows), 1))


def launched(*names: str | int) -> recurring.Launched:
    """Return kernels that were launched one after the other, 10 apart; given numbers, one at each of these times."""
    if at := [time for time in names if isinstance(time, int)]:
        return recurring.Launched(["k"], column(*[0] * len(at)), column(*at))
    each = list(dict.fromkeys(map(str, names)))
    return recurring.Launched(each, column(*(each.index(str(n)) for n in names)), np.arange(len(names)) * 10)


def every(name: str, apart: int, count: int, takes: int) -> list[tuple[str, int, int]]:
    return [(name.format(n), n * apart, n * apart + takes) for n in range(count)]


STEP = ["embed", *["gemm", "norm"] * 4, *["gemm_grad", "norm_grad"] * 4, "multi_tensor_apply_kernel<adam>"]
UNLIKE = ["a", "b", "c", "d", "e", "f", "multi_tensor_apply_kernel<adam>"]
LAYERS = ["gemm", "norm", "flash", "gelu"] * 12
STEP_NAMES = (
    "train_step",
    "[pl][profile]run_training_batch",
    "iteration {}",
    "Step: {}",
    "global_step={}",
    "train/iter",
    "batch",
)
NO_STEPS = ("optimizer_step", "lr_scheduler.step", "stepper", "valid_step", "collate_batch")


@pytest.mark.parametrize(
    ("ranges", "ran", "numbers", "start", "dur"),
    [
        *(
            ([*every(name, 100, 4, 100), ("forward", 1, 50)], [], [0, 1, 2, 3], [0, 100, 200, 300], [100] * 4)
            for name in STEP_NAMES
        ),
        # dlprof's own steps keep their numbers and come before others; a single one of torch's counts.
        (
            [*((f"dlprof::step {n}", n * 100, n * 100 + 100) for n in (7, 8)), *every("train_step", 200, 5, 200)],
            *([], [7, 8], [700, 800], [100, 100]),
        ),
        ([("ProfilerStep#4", 5, 25)], [], [4], [5], [20]),
        # A job that starves its device: two steps, then a stall, and so on.
        (
            [(f"step {n}", n // 2 * 2_000 + n % 2 * 80, n // 2 * 2_000 + n % 2 * 80 + 70) for n in range(6)],
            *([n // 2 * 2_000 + n % 2 * 80 + 10 for n in range(6)], [0, 1, 2, 3, 4], None),
            [80, 1920, 80, 1920, 80],
        ),
        # Without numbers they hold nearly all kernels, or the name may be that of a part.
        (every("train_step", 100, 4, 10), [5, 6, 105, 106, 205, 206, 305, 306], None, None, [100] * 3),
        (every("train_step", 100, 4, 10), [5, 6, 50, 105, 106, 150, 205, 206, 250, 305, 306], None, None, None),
        # What is between the ranges belongs to a step; 60 of something else do not, and half of the time is too much.
        (
            [("train_step", at, at + 80) for at in (0, 100, 200, 340, 440)],
            [],
            None,
            [0, 100, 200, 340],
            [100, 100, 80, 100],
        ),
        ([("train_step", at, at + 80) for at in (0, 100, 200, 900, 1000)], [], None, None, None),
        *((every(name, 100, 2, 95), [], None, None, None) for name in NO_STEPS),
        (every("DeepSpeedEngine.step", 100, 4, 10), [], None, None, None),  # short: the optimizer's
        # Without names: from one run of the optimizer to the next.
        # What comes before the first run is like the others here.
        ([], STEP * 5, None, [-1, 170, 350, 530, 710], [171, *[180] * 4]),
        ([], STEP[9:] + STEP * 4, None, [80, 260, 440, 620], [180] * 4),
        (
            [("Optimizer.step#AdamW.step", n * 180 + 165, n * 180 + 172) for n in range(5)],
            STEP * 5,
            None,
            None,
            [173, *[180] * 4],
        ),
        ([], [*STEP, "multi_tensor_apply_kernel<clip>", "fused_adam"] * 4, None, None, [191, *[200] * 3]),
        # Two optimizers that take turns; a validation, and what is not alike at all.
        ([], [*STEP, *UNLIKE, *STEP, *UNLIKE, *STEP], None, [170, 420], [250, 250]),
        ([], [*STEP * 4, *LAYERS, *STEP * 3], None, None, [171, *[180] * 5]),
        ([], [*STEP, *UNLIKE, *LAYERS, UNLIKE[-1]], None, None, None),
        ([], STEP * 2, None, None, None),  # one step: nothing shows that it recurs
        (every("FSDP::forward (blocks.{})", 40, 12, 39), LAYERS, None, None, None),
    ],
)
def test_steps_of_an_export(ranges: list[Any], ran: list[Any], numbers: Any, start: Any, dur: Any) -> None:
    found = recurring.find(ranged(*ranges), launched(*ran))
    if dur is None:
        assert found is None
        return
    assert found is not None
    assert found.dur.tolist() == dur
    assert start in (None, found.start.tolist())
    assert numbers in (None, found.number.tolist())
    assert found.sure == (recurring.LIKELY if ran and isinstance(ran[0], str) else recurring.CERTAIN)


def test_what_recurs_within_a_step_is_a_loop() -> None:
    assert recurring.loop(launched(*LAYERS)) == recurring.Loop(4, 12, 40.0, 40.0, 0.0)
    assert recurring.loop(launched("a", "b", "c", "d", "e", "f")) is None
    assert recurring.loop(launched()) is None


# Nsight Systems: the job that was simulated, in every version, and real exports.


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.traced(tmp_path_factory.mktemp("traces") / "run")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of two ranks, of nsys 2024."""
    return exports.exported(tmp_path_factory.mktemp("nsys") / "x.sqlite", version=2024)


@pytest.fixture(scope="module")
def exported_result(exported: Path) -> Result:
    return analyse(exported, 1)


@pytest.mark.parametrize("version", nsys.VERSIONS)
def test_every_version_gives_the_rows_of_a_torch_trace(version: int, traced: Path, tmp_path: Path) -> None:
    run = open_run(exports.exported(tmp_path / "x.sqlite", version=version))
    assert [rank.index for rank in run.ranks] == [0, 1]
    for rank in run.ranks:
        got = export.read(rank.files["nsys"], rank.pieces["nsys"])
        expected = torch_trace.read(traced / f"rank-{rank.index}.pt.trace.json.gz")
        texts = dict.fromkeys(("name", "kind", "copy", "memory", "lane"), str)
        ours, theirs = (one.tables["spans"].astype(texts) for one in (got, expected))
        theirs = theirs[~(theirs["lane"].str.startswith("device") & theirs["kind"].isin(["annotation", "sync"]))]
        ours = ours[ours["kind"] != "sync"]
        ours["name"] = ours["name"].str.replace("dlprof::step ", "ProfilerStep#")
        columns = ["kind", "name", "start_ns", "dur_ns", "copy", "memory"]
        ours, theirs = (one[columns].sort_values(columns, ignore_index=True) for one in (ours, theirs))
        assert (len(ours) > 1_000, ours.equals(theirs)) == (True, True)
        assert got.tables["traced_steps"].equals(expected.tables["traced_steps"])
        assert got.facts["host"] == expected.facts["host"]
        assert got.facts["devices"][0]["name"] == expected.facts["devices"][0]["name"]
        assert (got.facts["nsys"], got.warnings) == (nsys.VERSIONS[version][0], ())


def test_rows_in_any_order_are_the_same_rows(exported: Path, tmp_path: Path) -> None:
    """From 2025.6 on, nsys exports rows in no order."""
    mixed = Path(shutil.copy(exported, tmp_path / exported.name))
    with sqlite3.connect(mixed) as connection:
        made = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        for name, sql in made:
            connection.execute(f"ALTER TABLE {name} RENAME TO held")
            connection.execute(sql)
            connection.execute(f"INSERT INTO {name} SELECT * FROM held ORDER BY (rowid * 7919) % 1009, rowid DESC")
            connection.execute("DROP TABLE held")
    connection.close()
    for rank in open_run(exported).ranks:
        ours, theirs = (export.read(path, rank.pieces["nsys"]) for path in (mixed, exported))
        assert ours.facts == theirs.facts
        order = ["start_ns", "dur_ns", "lane", "name"]
        for table in theirs.tables:
            one, other = (
                of.tables[table].astype({"lane": str, "name": str} if table == "spans" else {}) for of in (ours, theirs)
            )
            by = order if table == "spans" else ["step"]
            assert one.sort_values(by, ignore_index=True).equals(other.sort_values(by, ignore_index=True))


def test_rules_and_figures_are_those_of_the_torch_trace(traced: Path, exported_result: Result) -> None:
    ours, theirs = exported_result, analyse(traced, 1)
    assert (ours.window, ours.time) == (theirs.window, theirs.time)
    assert [(o.id, o.saving_ns) for o in ours.found] == [(o.id, o.saving_ns) for o in theirs.found]
    assert ours.found
    assert "steps of the trace by" in {fact.name for fact in ours.facts}


@pytest.mark.parametrize(("marks", "count"), [("train_step", 4), ("", 4), ("none", 4)])
def test_steps_are_found_with_and_without_names(marks: str, count: int, tmp_path: Path) -> None:
    reading = export.read(exports.exported(tmp_path / "x.sqlite", 1, marks=marks))
    found = reading.tables["traced_steps"]
    alone = torch_trace.read(exports.traced(tmp_path / "alone", 1) / "rank-0.pt.trace.json.gz")
    assert len(found) == count
    assert found["dur_ns"].mean() == pytest.approx(alone.tables["traced_steps"]["dur_ns"].mean(), rel=0.05)
    assert reading.facts["steps_by"]
    assert any("--trace=cuda,nvtx" in line for line in reading.warnings) == (marks == "none")


@pytest.mark.parametrize("year", [2022, 2023])
def test_real_exports_of_a_job_on_a_cpu(year: int) -> None:
    path = GOLDEN / f"nsys_{year}.sqlite.gz"
    (rank,) = open_run(path).ranks
    reading = export.read(path, rank.pieces["nsys"])
    spans = reading.tables["spans"]
    assert reading.facts["nsys"].startswith(str(year))
    # Where time passes between the ranges, what follows the last one is not there.
    assert reading.tables["traced_steps"]["step"].tolist() == list(range(7))
    assert (spans["kind"].value_counts()[["annotation", "fetch"]]).tolist() == [33, 8]
    assert spans["name"].value_counts()[["forward", "backward", "optimizer"]].tolist() == [8, 8, 8]
    # 2026-11-24: the export's times are since the start of the capture.
    assert 1_795_500_000_000_000_000 < spans["start_ns"].min() < 1_795_600_000_000_000_000
    result = analyse(path, 1)
    assert (result.found, result.time) == ((), ())  # nobody saw what the CPU computed


@pytest.mark.skipif(not (TRACES / "nsys").is_dir(), reason="needs ../shared/traces/nsys")
@pytest.mark.parametrize(
    ("name", "nccl_ms", "span_ms", "published"),
    [
        ("before", (17.17, 8.23), (299.85, 298.66), (25.4, 598.52)),
        ("after", (9.99, 23.75), (299.25, 299.27), (33.7, 598.46)),
    ],
)
def test_the_published_pair(name: str, nccl_ms: tuple[float, ...], span_ms: tuple[float, ...], published: Any) -> None:
    """Its authors: exposed NCCL 25.4 → 33.7 ms, step 598.52 → 598.46 ms.

    Both are sums over two GPUs of a window of 300 ms, which holds no whole step: the first is matched, and the second
    is how long the GPUs' work in the window lasts (598.51 and 598.52 ms).
    """
    path = TRACES / "nsys" / f"two_gpu_{name}.sqlite.gz"
    times = measured(path, device_time).frame(device_time).sort_values("rank")
    exposed, whole = times["exposed_communication_ns"] / 1e6, times["span_ns"] / 1e6
    assert exposed.tolist() == pytest.approx(nccl_ms, abs=0.01)
    assert whole.tolist() == pytest.approx(span_ms, abs=0.01)
    assert exposed.sum() == pytest.approx(published[0], abs=0.05)
    assert whole.sum() == pytest.approx(published[1], abs=0.07)
    for rank in open_run(path).ranks:
        reading = export.read(rank.files["nsys"], rank.pieces["nsys"])
        assert not len(reading.tables["traced_steps"])  # a layer recurs in it, and no step
        assert any("119 kernels" in line for line in reading.warnings)


# Nsight Systems: rows.

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ON_DEVICE = {"start": 0, "end": 10, "deviceId": 1, "streamId": 13, "correlationId": 5, "globalPid": PID}


def names(rows: Rows) -> list[tuple[str, str]]:
    return [(rows.names[n], rows.kinds[n]) for n in rows.name.tolist()]


def test_each_kind_of_work_has_its_name_kind_and_place(tmp_path: Path) -> None:
    copied = [(100, 1, 0, 2), (200, 2, 2, 1), (300, 8, 2, 2), (-1, 77, 9, None)]
    keys = ("bytes", "copyKind", "srcKind", "dstKind")
    path = exports.tables(
        tmp_path / "x",
        StringIds=[text(1, "void gemm<float>()"), text(2, NCCL)],
        CUPTI_ACTIVITY_KIND_KERNEL=[kernel(1, 0, 10, 3), kernel(2, 10, 20, 0), kernel(99, 20, 30)],
        CUPTI_ACTIVITY_KIND_MEMCPY=[ON_DEVICE | dict(zip(keys, one, strict=True)) for one in copied],
        CUPTI_ACTIVITY_KIND_MEMSET=[ON_DEVICE | {"bytes": 64}],
        CUPTI_ACTIVITY_KIND_GRAPH_TRACE=[ON_DEVICE | {"graphId": 4}],
        CUPTI_ACTIVITY_KIND_SYNCHRONIZATION=[ON_DEVICE | {"syncType": 3, "streamId": 2**32 - 1, "deviceId": 0}],
    )
    with open_database(path) as database:
        ran, graphs, copies, sets, syncs = export.device_rows(database, PID, 1)
    assert names(ran) == [("void gemm<float>()", "kernel"), (NCCL, "communication"), ("unnamed kernel", "kernel")]
    assert ran.launch.tolist() == [3, -1, 1]
    ends = ("HtoD (Pageable -> Device)", "DtoH (Device -> Pinned)", "DtoD (Device -> Device)")
    assert [name for name, _ in names(copies)] == [*(f"Memcpy {end}" for end in ends), "Memcpy"]
    assert [copies.directions[n] for n in copies.name.tolist()][:2] == [("HtoD", "pageable"), ("DtoH", "pinned")]
    assert copies.bytes.tolist() == [100, 200, 300, -1]
    assert (names(sets), sets.bytes.tolist()) == ([("Memset (Device)", "set")], [64])
    assert names(graphs) == [("CUDA graph 4", "kernel")]
    # nsys 2026 writes 0 for the device of every synchronisation.
    assert (names(syncs), syncs.device.tolist(), syncs.stream.tolist()) == ([("Stream Sync", "sync")], [1], [-1])


def test_numbers_that_the_file_names_itself_come_first(tmp_path: Path) -> None:
    kinds = ((60, "CUDA_MEMOPR_MEMORY_KIND_DEVICE"), (61, "CUDA_MEMOPR_MEMORY_KIND_PAGEABLE"))
    path = exports.tables(
        tmp_path / "x",
        StringIds=K,
        CUPTI_ACTIVITY_KIND_MEMCPY=[ON_DEVICE | {"bytes": 1, "copyKind": 50, "srcKind": 60, "dstKind": 61}],
        ENUM_CUDA_MEMCPY_OPER=[{"id": 50, "name": "CUDA_MEMCPY_KIND_DTOH"}],
        ENUM_CUDA_MEM_KIND=[{"id": number, "name": name} for number, name in kinds],
        NVTX_EVENTS=[mark("a", 1, 2, kind=159), mark("b", 1, 2, kind=59)],
        ENUM_NSYS_EVENT_TYPE=[{"id": 159, "name": "NvtxPushPopRange"}, {"id": 59, "name": "NvtxMark"}],
    )
    with open_database(path) as database:
        assert export.device_rows(database, PID, 1)[2].directions == [("DtoH", "pageable")]
        found = export.read_ranges(database, None)
    assert [found.names[n] for n in found.name.tolist()] == ["a"]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("cudaLaunchKernel_v7000", "cudaLaunchKernel"),
        ("cudaMemcpyAsync_ptsz_v7000", "cudaMemcpyAsync"),
        ("cuLaunchKernelEx", "cuLaunchKernelEx"),
    ],
)
def test_calls_lose_the_version_of_their_interface(written: str, name: str, tmp_path: Path) -> None:
    row = {"start": 1, "end": 2, "globalTid": PID | 77, "correlationId": 9, "nameId": 1}
    path = exports.tables(tmp_path / "x", StringIds=[text(1, written)], CUPTI_ACTIVITY_KIND_RUNTIME=[row])
    with open_database(path) as database:
        calls = export.calls(database, PID)
    assert names(calls) == [(name, "runtime")]
    assert (calls.device.tolist(), calls.stream.tolist(), calls.launch.tolist()) == ([-1], [77], [9])


def test_names_of_ranges_are_in_the_row_or_among_the_texts_and_operators_lose_their_arguments(tmp_path: Path) -> None:
    rows = [
        mark("aten::mm, op_id = 12, sizes = [[2, 3], [3, 4]]", 20, 30),
        mark("aten::mm, seq = 3, op_id = 13", 40, 50),
        *({**mark("", at, end), "text": None, "textId": n} for at, end, n in ((10, 60, 7), (70, 80, 8))),
        mark("loading, please wait", 5, 100, kind=60),
        mark("open", 90, None),
        mark("a domain", 1, 2, kind=75),
        mark("another process", 1, 2, thread=HOST | 9 << 24),
    ]
    path = exports.tables(
        tmp_path / "x", StringIds=[text(7, "step 3"), text(8, "aten::add, seq = 1")], NVTX_EVENTS=rows
    )
    with open_database(path) as database:
        found = export.read_ranges(database, PID)
    which = zip(found.name.tolist(), found.start.tolist(), strict=True)
    assert [(found.names[n], found.operator[n], start) for n, start in which] == [
        ("loading, please wait", False, 5),
        ("step 3", False, 10),
        ("aten::mm", True, 20),
        ("aten::mm", True, 40),
        ("aten::add", True, 70),
    ]
    assert found.open == 1


def test_graphs_that_were_not_traced_by_node_and_lost_events_are_named(tmp_path: Path) -> None:
    path = exports.tables(
        tmp_path / "x",
        StringIds=K,
        CUPTI_ACTIVITY_KIND_KERNEL=[kernel(1, 0, 5)],
        CUPTI_ACTIVITY_KIND_GRAPH_TRACE=[ON_DEVICE | {"start": 5, "end": 9, "deviceId": 0, "graphId": 3}],
        DIAGNOSTIC_EVENT=[{"severity": 3, "text": "events\nwere lost"}, {"severity": 1, "text": "hello"}],
        OSRT_API=[{"start": 1, "end": 2, "globalTid": PID}],
    )
    reading = export.read(path)
    assert reading.tables["spans"]["name"].tolist() == ["k", "CUDA graph 3"]
    words = "\n".join(reading.warnings)
    for part in ("--cuda-graph-trace=node", "--trace=cuda", "events were lost", "operating system"):
        assert part in words
    assert "hello" not in words


@pytest.mark.parametrize(("at", "start"), [(5, 17 * 10**17 + 5), (10**18 + 5, 10**18 + 5)])
def test_times_are_since_the_start_of_the_session_unless_they_are_unix_times(
    tmp_path: Path, at: int, start: int
) -> None:
    session = [{"utcEpochNs": 17 * 10**17}]
    ran = [kernel(1, at, at + 5)]
    path = exports.tables(
        tmp_path / "x", StringIds=K, CUPTI_ACTIVITY_KIND_KERNEL=ran, TARGET_INFO_SESSION_START_TIME=session
    )
    assert export.read(path).tables["spans"]["start_ns"].tolist() == [start]


def test_hostile_rows_are_left_out_and_damaged_files_are_read_or_refused_in_words(
    tmp_path: Path, exported: Path
) -> None:
    rows = [kernel(1, 0, 5), kernel(1, 7, 3), kernel(1, -(2**63), 2**63 - 1), kernel(1, 2**63 - 9, 2**63 - 1)]
    rows += [
        {**kernel(1, 1, 2), "start": "soon"},
        {**kernel(2**62, 8, 9, 2**63 - 1), "deviceId": -5, "streamId": 2**40},
    ]
    rows += [{**kernel(1, 1, 2), "end": b"\xff" * 9, "streamId": "x", "correlationId": -(2**63)}]
    marks = [mark("x" * 5_000, 0, 9), mark("\ud7ff\0\x1b[31m", 1, 2), mark("open", 2**62, None)]
    path = exports.tables(tmp_path / "x", StringIds=K, CUPTI_ACTIVITY_KIND_KERNEL=rows, NVTX_EVENTS=marks)
    reading = export.read(path)
    assert 3 <= (reading.tables["spans"]["kind"] == "kernel").sum() <= 4
    assert any("usable time" in line for line in reading.warnings)
    assert getattr(analyse(path, 1).window, "unit", "") == "trace"
    whole = exported.read_bytes()
    rng = random.Random(7)
    outcomes: list[int] = []
    for n in range(16):
        data = bytearray(whole[: rng.randrange(len(whole))] if n % 2 else whole)
        for _ in range(40 * (1 - n % 2)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "damaged").write_bytes(bytes(data))
        with suppress(DlprofError):
            outcomes.append(len(export.read(tmp_path / "damaged").tables["spans"]))
    assert max(outcomes) > 100


def test_a_database_without_rows_or_of_something_else(tmp_path: Path) -> None:
    songs = exports.tables(tmp_path / "x", songs=[{"title": "a"}])
    for function in (export.read, processes_of):
        with pytest.raises(DlprofError, match="no export of Nsight Systems"):
            function(songs)
    assert piece_of(songs, 4000) == ""
    with sqlite3.connect(tmp_path / "y") as connection:
        connection.execute("CREATE TABLE StringIds (id, value)")
        connection.execute("CREATE TABLE NVTX_EVENTS (start, end)")
    connection.close()
    assert not len(export.read(tmp_path / "y").tables["spans"])
    (tmp_path / "z.sqlite.gz").write_bytes(gzip.compress(b"no database"))
    with pytest.raises(DlprofError, match="not a SQLite file"):
        export.read(tmp_path / "z.sqlite.gz")


# Nsight Systems: ranks and reports.


def test_ranks_are_the_processes_that_work_on_a_device_in_the_order_of_the_devices(tmp_path: Path) -> None:
    third = HOST | 6 << 24
    ran = [kernel(1, 0, 10, device=1), kernel(1, 10, 11, device=0)]  # a rank that touches device 0
    ran += [kernel(1, 0, 10, device=0, pid=pid) for pid in (SECOND, third)]
    path = exports.tables(tmp_path / "x", StringIds=K, CUPTI_ACTIVITY_KIND_KERNEL=ran, NVTX_EVENTS=[mark("a", 0, 9)])
    assert processes_of(path) == [Process(SECOND, 0), Process(third, 0), Process(PID, 1)]
    assert [one.pid for one in processes_of(path)] == [5, 6, 4000]
    assert [piece_of(path, pid) for pid in (4000, 4001)] == [str(PID), ""]
    # Without a device they are those that name ranges; a version that keeps no process is one rank.
    marks = [mark("a", n, n + 1) for n in range(30)] + [mark("b", 0, 1, thread=HOST | 9 << 24 | 1)]
    assert processes_of(exports.tables(tmp_path / "y", StringIds=K, NVTX_EVENTS=marks)) == [Process(PID, -1)]
    row = {key: value for key, value in kernel(1, 0, 10, device=2).items() if key != "globalPid"}
    path = exports.tables(tmp_path / "z", StringIds=K, CUPTI_ACTIVITY_KIND_KERNEL=[row])
    assert (processes_of(path), Process(None, 2).key) == ([Process(None, 2)], "")


def one(path: Path, *pids: int, device: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    ran = [kernel(1, 6 * n, 6 * n + 5, device=device, pid=pid) for n, pid in enumerate(pids or (PID,))]
    return exports.tables(path, StringIds=K, CUPTI_ACTIVITY_KIND_KERNEL=ran)


def test_a_folder_of_exports_is_one_run_and_processes_of_a_file_are_ranks(tmp_path: Path) -> None:
    for rank in (3, 1):
        one(tmp_path / f"a/report_rank{rank}.anything", device=rank)
    exports.tables(tmp_path / "a/songs.db", songs=[{"title": "a"}])
    (tmp_path / "a/notes.sqlite").write_text("no database")
    run = open_run(tmp_path / "a")
    found = [(rank.index, rank.files["nsys"].name) for rank in run.ranks]
    assert found == [(1, "report_rank1.anything"), (3, "report_rank3.anything")]
    assert {taken.path.name for taken in run.taken if not taken.ranks} == {"songs.db", "notes.sqlite"}
    path, packed = one(tmp_path / "x", PID, SECOND, SECOND), tmp_path / "y.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, packed):
        pieces = [rank.pieces["nsys"] for rank in open_run(file).ranks]
        assert pieces == [str(SECOND), str(PID)]
        assert [len(format_named("nsys").tables_of(file, p).tables["spans"]) for p in pieces] == [2, 1]
    # Traces come before exports beside them.
    shutil.copytree(exports.traced(tmp_path / "traces", 1), tmp_path / "both")
    one(tmp_path / "both/x.sqlite")
    run = open_run(tmp_path / "both")
    assert [list(rank.files) for rank in run.ranks] == [["torch_trace"]]
    assert [taken.path.name for taken in run.taken if not taken.ranks] == ["x.sqlite"]
    assert {"memory", "stacks", "samples"} <= set(format_named("nsys").lacks)


def test_each_recorded_rank_is_its_process_of_the_export_of_its_host(tmp_path: Path) -> None:
    one(tmp_path / "hosts/node/nsys.sqlite", PID, SECOND)
    for rank, pid, host in ((0, 5, "node"), (1, 4000, "node"), (2, 7, "node"), (3, 5, "other")):
        (tmp_path / f"ranks/{rank:05d}").mkdir(parents=True)
        facts = {"rank": rank, "pid": pid, "host": host}
        (tmp_path / f"ranks/{rank:05d}/facts.json").write_text(json.dumps(facts))
    assert [rank.pieces.get("nsys") for rank in open_run(tmp_path).ranks] == [str(SECOND), str(PID), None, None]


def test_a_report_needs_its_export_or_nsys_which_writes_into_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for nsys copies an export: this tests how nsys is called, not what it writes."""
    monkeypatch.setattr(of_nsys, "_made", {})
    monkeypatch.setattr(of_nsys, "_refused", {})
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    report, program = tmp_path / "reports/x.nsys-rep", tmp_path / "bin/nsys"
    report.parent.mkdir()
    report.write_bytes(b"NVIDIA Tegra Profiler Report 1.\n and more\0\1")

    def spans() -> int:
        (rank,) = open_run(report).ranks
        return len(format_named("nsys_report").tables_of(report, rank.pieces["nsys_report"]).tables["spans"])

    for path in (report, report.parent):
        with pytest.raises(DlprofError, match="nsys export --type sqlite"):
            open_run(path)
    beside = one(report.with_suffix(".sqlite"))
    assert [rank.files["nsys"].name for rank in open_run(report.parent).ranks] == ["x.sqlite"]
    assert spans() == 1
    beside.rename(tmp_path / "export")
    program.write_text(
        f'#!/bin/sh\necho >> "{tmp_path}/calls"\n'
        f'for w; do case $w in --output=*) cp "{tmp_path}/export" "${{w#*=}}";; esac; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert [spans(), spans()] == [1, 1]
    assert (tmp_path / "calls").read_text() == "\n"
    assert [path.name for path in report.parent.iterdir()] == ["x.nsys-rep"]
    program.write_text("#!/bin/sh\necho cannot >&2\nexit 4\n")
    with pytest.raises(DlprofError, match=r"\(4\): cannot"):
        format_named("nsys_report").tables_of(report.with_name("y.nsys-rep"), "")
    # One that is newer than nsys: why it cannot be read is what nsys says of it, and not the advice after that.
    newer = report.parent / "newer.nsys-rep"
    newer.write_bytes(report.read_bytes())
    program.write_text(
        "#!/bin/sh\nprintf 'Processing: [1%% ]Exportation error: created by 2024.2\\nPlease update\\n' >&2\nexit 1\n"
    )
    with pytest.raises(
        DlprofError, match=r"newer.nsys-rep: nsys export failed \(1\): Exportation error: created by 2024.2$"
    ):
        format_named("nsys_report").tables_of(newer, "")
    assert list(open_run(newer).ranks[0].files) == ["nsys_report"]


# rocprofv3: databases.

COLUMNS = ["kind", "name", "start_ns", "dur_ns", "launch", "bytes", "copy"]


def given(path: Path, rank: int) -> pd.DataFrame:
    spans = export.read(path, open_run(path).ranks[rank].pieces["nsys"]).tables["spans"]
    return spans[~spans["kind"].isin(["sync", "set"])]


def comparable(spans: pd.DataFrame) -> pd.DataFrame:
    """Return the columns that both have; the two tools name copies differently, and here only copies have bytes."""
    made = spans.astype({"kind": str, "name": str, "copy": str})[COLUMNS]
    is_copy = made["kind"] == "copy"
    made["name"], made["bytes"] = made["name"].mask(is_copy, "copy"), made["bytes"].where(is_copy, -1)
    made["launch"] = made["launch"].where(made["kind"] != "annotation", -1)
    return made.sort_values(COLUMNS, ignore_index=True)


def test_spans_and_steps_of_a_database_are_those_of_the_process(exported: Path, tmp_path: Path) -> None:
    path = rocpd.write(tmp_path / "4000_results.db", given(exported, 0))
    assert known(path) == "rocpd"
    made = read_database(path)
    ours, theirs = map(comparable, (made.tables["spans"], given(exported, 0)))
    assert (len(ours) > 500, ours.equals(theirs)) == (True, True)
    expected = export.read(exported, open_run(exported).ranks[0].pieces["nsys"]).tables["traced_steps"]
    assert made.tables["traced_steps"].equals(expected)
    assert (made.facts["host"], made.facts["steps_by"].split(" '")[0]) == ("frontier-7", "roctx ranges")
    assert made.facts["devices"] == [{"id": rocpd.GPU, "name": "AMD GPU 9"}]
    devices = {lane for lane in made.tables["spans"]["lane"].astype(str) if lane.startswith("device")}
    assert devices
    assert all(lane.startswith("device:") for lane in devices)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    cut = read_database(path)
    assert len(cut.tables["spans"]) <= len(made.tables["spans"])
    assert any("cannot be read to its end" in warning for warning in cut.warnings)


def test_databases_of_a_job_are_numbered_by_their_environment_and_give_the_same_findings(
    exported: Path, exported_result: Result, tmp_path: Path
) -> None:
    for place, rank in enumerate((1, 0)):
        rocpd.write(tmp_path / f"job/{place}.db", given(exported, rank), place, {"RANK": str(rank)})
    run = open_run(tmp_path / "job")
    assert [(rank.index, rank.files["rocpd"].name) for rank in run.ranks] == [(0, "1.db"), (1, "0.db")]
    ours, theirs = analyse(tmp_path / "job", 1), exported_result
    assert ours.window is not None
    assert theirs.window is not None
    assert ours.window.step_ns == theirs.window.step_ns
    assert [o.id for o in ours.found] == [o.id for o in theirs.found] != []
    # Two processes in one database are two ranks.
    first, second = (rocpd.write(tmp_path / f"{n}.db", given(exported, n), n) for n in (0, 1))
    with sqlite3.connect(first) as into, sqlite3.connect(second) as source:
        for name, statement in source.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall():
            into.execute(statement)
            rows = source.execute(f'SELECT * FROM "{name}"').fetchall()
            if rows:
                into.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(rows[0]))})', rows)
    into.close()
    source.close()
    pieces = [rank.pieces["rocpd"] for rank in open_run(first).ranks]
    left, right = (read_database(first, piece).tables["spans"] for piece in pieces)
    assert not left["start_ns"].equals(right["start_ns"])


def test_other_hostile_and_damaged_databases(exported: Path, tmp_path: Path) -> None:
    other = exports.tables(tmp_path / "other.db", T=[{"start": 1}])
    assert known(other) is None
    with pytest.raises(DlprofError, match="no kernel in it"):
        read_database(other)
    # A table without the columns that the schema has, and numbers that are none.
    odd = exports.tables(tmp_path / "odd.db", rocpd_kernel_dispatch_1=[{"pid": 1, "start": "x", "end": None}])
    made = read_database(odd)
    assert [table.empty for table in (made.tables["spans"], made.tables["traced_steps"])] == [True, True]
    assert any("1 events without a usable time" in warning for warning in made.warnings)
    data = rocpd.write(tmp_path / "x.db", given(exported, 0).head(60)).read_bytes()
    rng, read = random.Random(1), 0
    for count in (1, 3, 20) * 10:
        damaged = bytearray(data)
        for at in rng.choices(range(len(data)), k=count):
            damaged[at] = rng.randrange(256)
        (tmp_path / "y.db").write_bytes(damaged)
        known(tmp_path / "y.db")
        with suppress(DlprofError):
            read += len(read_database(tmp_path / "y.db").tables) > 0
    assert read > 15


# rocprofv3: CSV and JSON.


def rocm(kind: str, names: list[str], *of: tuple[int, int, int]) -> Rows:
    """Return rows by place of the name, start in µs and device, each 1 µs long."""
    name, start, device = (column(*(row[i] for row in of)) for i in range(3))
    nothing = np.full(len(name), -1, dtype=np.int64)
    kinds = process.kinds_of(names) if kind == "kernel" else [kind] * len(names)
    made = Rows(names, kinds, name, start * 1000, start * 1000 + 1000, device, np.zeros_like(name), nothing, nothing)
    if kind == "copy":
        made.directions.extend(map(process.direction, names))
    return made


def test_the_device_with_most_kernels_is_the_ranks_and_without_marks_what_recurs_is_named() -> None:
    named = process.ranges_of([], column(), column(), column(), column())
    ran = [(place, 10 * n + 3 * place, 4) for place in range(3) for n in range(4)]
    gpu = rocm("kernel", ["gemm", "ncclDevKernel_Generic", "multi_tensor_apply_kernel"], *ran, (0, 5, 9))
    copies = rocm("copy", ["MEMORY_COPY_DEVICE_TO_HOST"], (0, 8, 4))
    made = process.reading("x", gpu, copies, rocm("runtime", []), named, ["before"], {"host": "h"})
    spans = made.tables["spans"].astype({"lane": str, "kind": str, "copy": str})
    assert spans.groupby(["lane", "kind"]).size().to_dict() == {
        ("device9:0", "kernel"): 1,
        ("device:0", "communication"): 4,
        ("device:0", "copy"): 1,
        ("device:0", "kernel"): 8,
    }
    assert (set(spans["copy"]), made.warnings[0], made.facts["host"]) == ({"", "DtoH"}, "before", "h")
    loop = rocm("kernel", ["a", "b"], *((n % 2, 5 * n, 0) for n in range(12)))
    made = process.reading("x", loop, rocm("copy", []), rocm("runtime", []), named, (), {})
    assert made.tables["traced_steps"].empty
    assert any("a loop of 2 kernels recurs" in line and "--marker-trace" in line for line in made.warnings)


@pytest.mark.parametrize(
    ("name", "to", "to_host"),
    [
        ("MEMORY_COPY_HOST_TO_DEVICE", "HtoD", False),
        ("MEMORY_COPY_DEVICE_TO_HOST", "DtoH", True),
        ("DEVICE_TO_DEVICE", "DtoD", False),
        ("unknown", "", False),
    ],
)
def test_directions_of_copies(name: str, to: str, to_host: bool) -> None:
    assert (process.direction(name), process.to_host(name)) == ((to, ""), to_host)


def rows_of(reading: Reading) -> list[tuple[object, ...]]:
    columns = ["lane", "kind", "name", "start_ns", "dur_ns", "launch", "copy"]
    return [tuple(row) for row in reading.tables["spans"][columns].itertuples(index=False)]


def test_csv_and_json_of_a_process_are_alike_and_known_by_their_content(tmp_path: Path) -> None:
    path = dialects.rocprof_csv(tmp_path / "csv")
    assert known(path) == "rocprofv3"
    assert {known(other) for other in path.parent.glob("*.csv") if other != path} == {"rocprofv3_parts"}
    with pytest.raises(DlprofError, match="it is read with the kernel trace"):
        format_named("rocprofv3_parts").tables_of(path.with_name("77_hip_api_trace.csv"), "")
    odd = tmp_path / "odd name"
    odd.write_text(json.dumps(dialects.rocprof_json()))
    assert known(odd) == "rocprofv3_json"
    by_csv, by_json = read_csv(path), read_json(odd)
    assert [row[1:] for row in rows_of(by_csv)] == [row[1:] for row in rows_of(by_json)]
    assert rows_of(by_json) == [
        ("host:11", "runtime", "hipLaunchKernel", 10_001, 2_000, 1, ""),
        ("host:11", "runtime", "hipLaunchKernel", 10_002, 2_000, 2, ""),
        ("host:11", "runtime", "hipMemcpyAsync", 10_003, 2_000, 3, ""),
        ("device:-1", "copy", "MEMORY_COPY_HOST_TO_DEVICE", 15_000, 3_000, 3, "HtoD"),
        ("device:1", "kernel", "Cijk_gemm<float, 4>", 20_000, 5_000, 1, ""),
        ("device:1", "communication", "ncclDevKernel_Generic", 30_000, 5_000, 2, ""),
    ]
    assert by_json.tables["spans"]["bytes"].max() == 4_096
    # Packed; with its host and the GPU that ran kernels, of two, by their place among the GPUs.
    whole = dialects.rocprof_json()
    agents = [{"id": {"handle": n}, "type": 2 if n > 1 else 1, "product_name": f"part {n}"} for n in (1, 3, 4)]
    whole["rocprofiler-sdk-tool"][0] |= {"agents": agents, "metadata": {"node": {"hostname": "node-9"}}}
    (tmp_path / "packed").write_bytes(gzip.compress(json.dumps(whole).encode()))
    assert known(tmp_path / "packed") == "rocprofv3_json"
    packed = read_json(tmp_path / "packed")
    assert rows_of(packed) == rows_of(by_json)
    assert packed.facts == {"host": "node-9", "devices": [{"id": 1, "name": "part 4"}]}


def test_markers_of_roctx_are_steps(tmp_path: Path) -> None:
    path = dialects.rocprof_csv(tmp_path / "csv")
    ranges = [(f"step {n}", 10_000 * (n + 1), 10_000 * (n + 2) - 100) for n in range(3)]
    lines = (
        f'"MARKER_CORE_RANGE_API","{name}","77","11","{50 + n}","{a}","{b}"\n' for n, (name, a, b) in enumerate(ranges)
    )
    path.with_name("77_marker_api_trace.csv").write_text(dialects.CALLS + "".join(lines))
    whole = dialects.rocprof_json()
    tool = whole["rocprofiler-sdk-tool"][0]
    tool["strings"]["marker_api"] = [{"key": 50 + n, "value": name} for n, (name, _, _) in enumerate(ranges)]
    tool["strings"]["marker_api"].append({"key": [], "value": "odd"})
    tool["buffer_records"]["marker_api"] = [
        {"kind": 4, "operation": 0, "thread_id": 11, "correlation_id": {"internal": 50 + n, "external": 0}}
        | {"start_timestamp": start, "end_timestamp": end}
        for n, (_, start, end) in enumerate([*ranges, ("", 70_000, 71_000)])
    ]
    (tmp_path / "77_results.json").write_text(json.dumps(whole))
    for reading in (read_csv(path), read_json(tmp_path / "77_results.json")):
        steps = reading.tables["traced_steps"]
        assert steps[["step", "start_ns"]].to_numpy().tolist() == [[0, 10_000], [1, 20_000], [2, 30_000]]
        assert reading.facts["steps_by"] == "roctx ranges 'step #' (named by the trace)"


def test_csv_of_two_processes_links_and_malformed_lines(tmp_path: Path) -> None:
    for pid in (77, 78):
        dialects.rocprof_csv(tmp_path / "two", pid)
    run = open_run(tmp_path / "two")
    assert [rank.files["rocprofv3"].name for rank in run.ranks] == ["77_kernel_trace.csv", "78_kernel_trace.csv"]
    left = [one.format.name for one in run.taken if one.left and one.format]
    assert left == ["rocprofv3_parts"] * 4
    path = dialects.rocprof_csv(tmp_path / "odd")
    head, *below = path.read_text().splitlines(keepends=True)
    lines = [head, f"a\rb\n{'c' * 200_000}\n", *below, "nonsense\n", '"a","b"\n' * 3]
    path.write_bytes("".join(lines).encode())
    reading = read_csv(path)
    assert len(reading.tables["spans"]) == 6
    assert any("6 malformed lines" in w for w in reading.warnings)
    calls = path.with_name("77_hip_api_trace.csv")
    calls.rename(tmp_path / "elsewhere.csv")
    calls.symlink_to(tmp_path / "elsewhere.csv")  # a link out of the folder is not followed
    assert "runtime" not in set(read_csv(path).tables["spans"]["kind"])


@pytest.mark.parametrize(
    ("data", "name"),
    [
        *((f'{{"rocprofiler-sdk-tool": {odd}'.encode(), "rocprofv3_json") for odd in ("[", "7}", "[{}]}")),
        *((odd, "") for odd in (b"SQLite format 3\0" + bytes(5000), b'{"rocprofiler": 1}', b"a,b\n")),
    ],
)
def test_broken_files_of_rocprof_are_one_line_and_others_none(tmp_path: Path, data: bytes, name: str) -> None:
    (tmp_path / "x").write_bytes(data)
    if name:
        assert known(tmp_path / "x") == name
        with pytest.raises(DlprofError):
            read_json(tmp_path / "x")
    else:
        assert not (known(tmp_path / "x") or "").startswith("roc")
