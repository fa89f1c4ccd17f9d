"""A database of rocprofv3 gives what Nsight Systems would have of the same job: spans, steps, ranks and findings."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path
from random import Random

import pandas as pd
import pytest

from dlprof.commands.report import analyse
from dlprof.errors import DlprofError
from dlprof.read.formats import Head, recognised
from dlprof.read.nsys import export
from dlprof.read.rocprof import rocpd as reader
from dlprof.read.run import open_run
from tests.fixtures import exports, rocpd

COLUMNS = ["kind", "name", "start_ns", "dur_ns", "launch", "bytes", "copy"]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of Nsight Systems of two ranks."""
    return exports.exported(tmp_path_factory.mktemp("nsys") / "x.sqlite")


def spans_of(path: Path, rank: int) -> pd.DataFrame:
    run = open_run(path)
    spans = export.read(path, run.ranks[rank].pieces["nsys"]).tables["spans"]
    return spans[~spans["kind"].isin(["sync", "set"])]


def comparable(spans: pd.DataFrame) -> pd.DataFrame:
    """Return the columns that both have; the two tools name copies differently, and here only copies have bytes."""
    made = spans.astype({"kind": str, "name": str, "copy": str})[COLUMNS]
    is_copy = made["kind"] == "copy"
    made["name"], made["bytes"] = made["name"].mask(is_copy, "copy"), made["bytes"].where(is_copy, -1)
    made["launch"] = made["launch"].where(made["kind"] != "annotation", -1)
    return made.sort_values(COLUMNS, ignore_index=True)


def test_spans_and_steps_are_those_of_the_process(simulated: Path, tmp_path: Path) -> None:
    given = spans_of(simulated, 0)
    path = rocpd.write(tmp_path / "4000_results.db", given)
    known = recognised(Head(path))
    assert known is not None
    assert known[0].name == "rocpd"
    made = reader.read(path)
    ours, theirs = map(comparable, (made.tables["spans"], given))
    assert len(ours) > 500
    assert ours.equals(theirs)
    expected = export.read(simulated, open_run(simulated).ranks[0].pieces["nsys"]).tables["traced_steps"]
    assert made.tables["traced_steps"].equals(expected)
    assert made.facts["host"] == "frontier-7"
    assert made.facts["devices"] == [{"id": rocpd.GPU, "name": "AMD GPU 9"}]
    assert made.facts["steps_by"].startswith("roctx ranges")
    lanes = set(made.tables["spans"]["lane"].astype(str))
    assert any(lane.startswith("device:") for lane in lanes)
    assert not any(lane.startswith("device") and not lane.startswith("device:") for lane in lanes)


def test_a_folder_of_databases_is_one_job_and_its_environment_tells_the_ranks(simulated: Path, tmp_path: Path) -> None:
    for place, rank in enumerate((1, 0)):
        rocpd.write(tmp_path / f"{place}.db", spans_of(simulated, rank), place, {"RANK": str(rank)})
    run = open_run(tmp_path)
    assert [(rank.index, rank.files["rocpd"].name) for rank in run.ranks] == [(0, "1.db"), (1, "0.db")]
    ours, theirs = analyse(tmp_path, 1), analyse(simulated, 1)
    assert ours.window is not None
    assert theirs.window is not None
    assert ours.window.step_ns == theirs.window.step_ns
    assert [o.id for o in ours.found] == [o.id for o in theirs.found]
    assert ours.found


def test_a_database_of_two_processes_is_two_ranks(simulated: Path, tmp_path: Path) -> None:
    first = rocpd.write(tmp_path / "all.db", spans_of(simulated, 0))
    second = rocpd.write(tmp_path / "second.db", spans_of(simulated, 1), 1)
    with sqlite3.connect(first) as into, sqlite3.connect(second) as of:
        for (statement,) in of.execute("SELECT sql FROM sqlite_master WHERE type = 'table'").fetchall():
            into.execute(statement)
        for (name,) in of.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            rows = of.execute(f'SELECT * FROM "{name}"').fetchall()
            if rows:
                into.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(rows[0]))})', rows)
    into.close()
    of.close()
    run = open_run(first)
    assert [rank.index for rank in run.ranks] == [0, 1]
    one, two = (reader.read(first, rank.pieces["rocpd"]).tables["spans"] for rank in run.ranks)
    assert not one["start_ns"].equals(two["start_ns"])


def test_other_databases_and_hostile_ones_are_no_trace(tmp_path: Path) -> None:
    other = exports.tables(tmp_path / "other.db", T=[{"start": 1}])
    known = recognised(Head(other))
    assert known is None
    with pytest.raises(DlprofError, match="no kernel in it"):
        reader.read(other)
    # A table without the columns that the schema has, and numbers that are none.
    odd = exports.tables(tmp_path / "odd.db", rocpd_kernel_dispatch_1=[{"pid": 1, "start": "x", "end": None}])
    made = reader.read(odd)
    assert made.tables["spans"].empty
    assert made.tables["traced_steps"].empty
    assert any("1 events without a usable time" in warning for warning in made.warnings)


def test_a_cut_off_database_gives_what_it_holds(simulated: Path, tmp_path: Path) -> None:
    path = rocpd.write(tmp_path / "x.db", spans_of(simulated, 0))
    whole = len(reader.read(path).tables["spans"])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    made = reader.read(path)
    assert len(made.tables["spans"]) <= whole
    assert any("cannot be read to its end" in warning for warning in made.warnings)


def test_damaged_bytes_are_never_more_than_an_error(simulated: Path, tmp_path: Path) -> None:
    data = rocpd.write(tmp_path / "x.db", spans_of(simulated, 0).head(60)).read_bytes()
    random = Random(1)
    read = 0
    for count in (1, 3, 20) * 20:
        damaged = bytearray(data)
        for at in random.choices(range(len(data)), k=count):
            damaged[at] = random.randrange(256)
        (tmp_path / "y.db").write_bytes(damaged)
        recognised(Head(tmp_path / "y.db"))
        with suppress(DlprofError):
            read += len(reader.read(tmp_path / "y.db").tables) > 0
    assert read > 30
