"""An export and a torch-profiler trace of the same job say the same, in the schema of every version."""

from __future__ import annotations

import gzip
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.timeline.device import device_time
from dlprof.commands.report import analyse
from dlprof.errors import DlprofError
from dlprof.read.kineto import torch_trace
from dlprof.read.nsys import export
from dlprof.read.run import open_run
from simulator import nsys
from tests.fixtures import exports
from tests.fixtures.exports import PID, kernel, mark, text
from tests.fixtures.runs import measured

GOLDEN = Path(__file__).parents[2] / "golden"
REAL = Path(__file__).parents[3].parent / "shared/traces/nsys"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.traced(tmp_path_factory.mktemp("traces") / "run")


@pytest.mark.parametrize("version", nsys.VERSIONS)
def test_every_version_gives_the_rows_of_a_torch_trace(version: int, traces: Path, tmp_path: Path) -> None:
    run = open_run(exports.exported(tmp_path / "x.sqlite", version=version))
    assert [rank.index for rank in run.ranks] == [0, 1]
    for rank in run.ranks:
        got = export.read(rank.files["nsys"], rank.pieces["nsys"])
        expected = torch_trace.read(traces / f"rank-{rank.index}.pt.trace.json.gz")
        ours, theirs = (
            one.tables["spans"].astype({"name": str, "kind": str, "copy": str, "memory": str, "lane": str})
            for one in (got, expected)
        )
        theirs = theirs[~(theirs["lane"].str.startswith("device") & theirs["kind"].isin(["annotation", "sync"]))]
        ours = ours[ours["kind"] != "sync"]
        ours["name"] = ours["name"].str.replace("dlprof::step ", "ProfilerStep#")
        columns = ["kind", "name", "start_ns", "dur_ns", "copy", "memory"]
        ours, theirs = (one[columns].sort_values(columns, ignore_index=True) for one in (ours, theirs))
        assert len(ours) > 1_000
        assert ours.equals(theirs)
        assert got.tables["traced_steps"].equals(expected.tables["traced_steps"])
        assert got.facts["host"] == expected.facts["host"]
        assert got.facts["devices"][0]["name"] == expected.facts["devices"][0]["name"]
        assert got.facts["nsys"] == nsys.VERSIONS[version][0]
        assert not got.warnings


def test_rules_and_figures_are_those_of_the_torch_trace(traces: Path, tmp_path: Path) -> None:
    ours, theirs = (analyse(path, 1) for path in (exports.exported(tmp_path / "x.sqlite", version=2024), traces))
    assert (ours.window, ours.time) == (theirs.window, theirs.time)
    assert [(o.id, o.saving_ns) for o in ours.found] == [(o.id, o.saving_ns) for o in theirs.found]
    assert len(ours.found) > 0
    assert {"steps of the trace by"} <= {fact.name for fact in ours.facts}


@pytest.mark.parametrize(("marks", "steps"), [("train_step", 4), ("", 3), ("none", 3)])
def test_steps_are_found_with_and_without_names(marks: str, steps: int, traces: Path, tmp_path: Path) -> None:
    path = exports.exported(tmp_path / "x.sqlite", 1, marks=marks)
    reading = export.read(path)
    found = reading.tables["traced_steps"]
    expected = torch_trace.read(exports.traced(tmp_path / "alone", 1) / "rank-0.pt.trace.json.gz").tables[
        "traced_steps"
    ]
    assert len(found) == steps
    assert found["dur_ns"].mean() == pytest.approx(expected["dur_ns"].mean(), rel=0.05)
    assert reading.facts["steps_by"]
    assert any("--trace=cuda,nvtx" in line for line in reading.warnings) == (marks == "none")


@pytest.mark.parametrize(("year", "count"), [(2022, 8), (2023, 7)])
def test_real_exports_of_a_job_on_a_cpu(year: int, count: int) -> None:
    run = open_run(GOLDEN / f"nsys_{year}.sqlite.gz")
    assert len(run.ranks) == 1
    reading = export.read(GOLDEN / f"nsys_{year}.sqlite.gz", run.ranks[0].pieces["nsys"])
    spans, steps = reading.tables["spans"], reading.tables["traced_steps"]
    assert reading.facts["nsys"].startswith(str(year))
    # Where time passes between the ranges, what follows the last one is not there.
    assert steps["step"].tolist() == list(range(count))
    assert (spans["kind"].value_counts()[["annotation", "fetch"]]).tolist() == [33, 8]
    assert spans["name"].value_counts()[["forward", "backward", "optimizer"]].tolist() == [8, 8, 8]
    # 2026-11-24: the export's times are since the start of the capture.
    assert 1_795_500_000_000_000_000 < spans["start_ns"].min() < 1_795_600_000_000_000_000
    result = analyse(GOLDEN / f"nsys_{year}.sqlite.gz", 1)
    assert not result.found  # nobody saw what the CPU computed
    assert not result.time


@pytest.mark.skipif(not REAL.is_dir(), reason="needs ../shared/traces/nsys")
@pytest.mark.parametrize(
    ("name", "nccl_ms", "span_ms"),
    [("before", (17.17, 8.23), (299.85, 298.66)), ("after", (9.99, 23.75), (299.25, 299.27))],
)
def test_the_published_pair(name: str, nccl_ms: tuple[float, ...], span_ms: tuple[float, ...]) -> None:
    """Its authors: exposed NCCL 25.4 → 33.7 ms, step 598.52 → 598.46 ms.

    Both are sums over two GPUs of a window of 300 ms, which holds no whole step: the first is matched, and the second
    is how long the GPUs' work in the window lasts (598.51 and 598.52 ms).
    """
    path = REAL / f"two_gpu_{name}.sqlite.gz"
    times = measured(path, device_time).frame(device_time).sort_values("rank")
    exposed = times["exposed_communication_ns"] / 1e6
    assert exposed.tolist() == pytest.approx(nccl_ms, abs=0.01)
    assert exposed.sum() == pytest.approx({"before": 25.4, "after": 33.7}[name], abs=0.05)
    assert (times["span_ns"] / 1e6).tolist() == pytest.approx(span_ms, abs=0.01)
    assert times["span_ns"].sum() / 1e6 == pytest.approx({"before": 598.52, "after": 598.46}[name], abs=0.07)
    for rank in open_run(path).ranks:
        reading = export.read(rank.files["nsys"], rank.pieces["nsys"])
        assert not len(reading.tables["traced_steps"])  # a layer recurs in it, and no step
        assert any("119 kernels" in line for line in reading.warnings)


def test_graphs_that_were_not_traced_by_node_are_told(tmp_path: Path) -> None:
    graph = {"start": 5, "end": 9, "deviceId": 0, "streamId": 7, "correlationId": 1, "globalPid": PID, "graphId": 3}
    path = exports.tables(
        tmp_path / "x",
        StringIds=[text(1, "k")],
        CUPTI_ACTIVITY_KIND_KERNEL=[kernel(1, 0, 5)],
        CUPTI_ACTIVITY_KIND_GRAPH_TRACE=[graph],
        DIAGNOSTIC_EVENT=[{"severity": 3, "text": "events\nwere lost"}, {"severity": 1, "text": "hello"}],
        OSRT_API=[{"start": 1, "end": 2, "globalTid": PID}],
    )
    reading = export.read(path)
    assert reading.tables["spans"]["name"].tolist() == ["k", "CUDA graph 3"]
    for word in ("--cuda-graph-trace=node", "--trace=cuda", "events were lost", "operating system"):
        assert sum(word in line for line in reading.warnings) >= 1
    assert not any("hello" in line for line in reading.warnings)


def test_times_that_are_unix_times_already_stay(tmp_path: Path) -> None:
    start = {"utcEpochNs": 1_700_000_000_000_000_000}
    for name, at, expected in (("a", 5, start["utcEpochNs"] + 5), ("b", 10**18 + 5, 10**18 + 5)):
        path = exports.tables(
            tmp_path / name,
            StringIds=[text(1, "k")],
            CUPTI_ACTIVITY_KIND_KERNEL=[kernel(1, at, at + 5)],
            TARGET_INFO_SESSION_START_TIME=[start],
        )
        assert export.read(path).tables["spans"]["start_ns"].tolist() == [expected]


def test_hostile_rows_are_left_out(tmp_path: Path) -> None:
    rows = [
        kernel(1, 0, 5),
        kernel(1, 7, 3),
        kernel(1, -(2**63), 2**63 - 1),
        kernel(1, 2**63 - 9, 2**63 - 1),
        {**kernel(1, 1, 2), "start": "soon"},
        {**kernel(1, 1, 2), "end": b"\xff" * 9, "streamId": "x", "correlationId": -(2**63)},
        {**kernel(2**62, 8, 9, 2**63 - 1), "deviceId": -5, "streamId": 2**40},
    ]
    marks = [mark("x" * 5_000, 0, 9), mark("\ud7ff\0\x1b[31m", 1, 2), mark("open", 2**62, None)]
    path = exports.tables(tmp_path / "x", StringIds=[text(1, "k")], CUPTI_ACTIVITY_KIND_KERNEL=rows, NVTX_EVENTS=marks)
    reading = export.read(path)
    assert 3 <= (reading.tables["spans"]["kind"] == "kernel").sum() <= 4
    assert any("usable time" in line for line in reading.warnings)
    assert getattr(analyse(path, 1).window, "unit", "") == "trace"


def test_a_damaged_export_is_read_or_refused_in_words(tmp_path: Path) -> None:
    whole = exports.exported(tmp_path / "x.sqlite", 1).read_bytes()
    rng = random.Random(7)
    outcomes: list[Any] = []
    for n in range(24):
        data = bytearray(whole)
        if n % 2:
            data = data[: rng.randrange(len(data))]
        else:
            for _ in range(40):
                data[rng.randrange(len(data))] = rng.randrange(256)
        path = tmp_path / f"{n}.sqlite"
        path.write_bytes(bytes(data))
        try:
            reading = export.read(path)
        except DlprofError as e:
            outcomes.append(str(e))
        else:
            outcomes.append(len(reading.tables["spans"]))
    assert any(isinstance(one, int) and one > 100 for one in outcomes)


def test_a_database_without_rows_or_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match="no export"):
        export.read(exports.tables(tmp_path / "x", songs=[{"title": "a"}]))
    with sqlite3.connect(tmp_path / "y") as connection:
        connection.execute("CREATE TABLE StringIds (id, value)")
        connection.execute("CREATE TABLE NVTX_EVENTS (start, end)")
    connection.close()
    assert not len(export.read(tmp_path / "y").tables["spans"])
    (tmp_path / "z.sqlite.gz").write_bytes(gzip.compress(b"no database"))
    with pytest.raises(DlprofError, match="not a SQLite file"):
        export.read(tmp_path / "z.sqlite.gz")
