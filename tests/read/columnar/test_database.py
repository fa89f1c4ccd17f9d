"""SQLite files from strangers: columns are read whole, and nothing of a file is run, followed or believed."""

from __future__ import annotations

import gzip
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.columnar.database import MISSING, is_sqlite, open_database
from dlprof.read.nsys.format import of_process
from tests.fixtures import exports


def test_columns_are_read_by_name_and_absent_ones_are_missing(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"Start": 5, "end": None, "name": "a"}, {"Start": 2**63 - 1, "end": 2.5, "name": "b"}]
    with open_database(exports.tables(tmp_path / "x", T=rows)) as database:
        held = database.integers("T", ["start", "end", "other", "other|start", "name"])
        assert held["start"].tolist() == [5, 2**63 - 1]
        assert held["end"].tolist() == [MISSING, 2]
        assert held["other"].tolist() == [MISSING] * 2
        assert held["other|start"].tolist() == held["start"].tolist()
        assert held["name"].tolist() == [0, 0]  # text is no number
        assert len(database.integers("none", ["start"])["start"]) == 0
        assert database.texts("T", "start", "name", [5]) == {5: "a"}
        assert not database.damage


def test_the_rows_of_a_process_are_those_of_its_threads(tmp_path: Path) -> None:
    rows = [{"globalTid": exports.PID | 1, "n": 1}, {"globalTid": exports.HOST | 1, "n": 2}]
    with open_database(exports.tables(tmp_path / "x", T=rows)) as database:
        held = database.integers("T", ["n"], *of_process(database, "T", exports.PID))
        assert held["n"].tolist() == [1]


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
    rows = [{"start": n, "text": f"{n:0100}"} for n in range(5_000)]
    whole = exports.tables(tmp_path / "x", T=rows).read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    with open_database(tmp_path / "cut") as database:
        held = database.integers("T", ["start"])["start"].tolist()
        known = [number for number in held if number != MISSING]  # of the page that was cut, rows may be empty
        assert known == sorted(set(known))
        assert known[:100] == list(range(100))
        assert 100 < len(known) < 5_000
        assert len(database.damage) == 1
    (tmp_path / "overwritten").write_bytes(whole[:200_000] + b"\xff" * 100_000 + whole[300_000:])
    with open_database(tmp_path / "overwritten") as database:
        held = database.integers("T", ["start"])["start"].tolist()
        assert held[:100] == list(range(100))
        assert set(held) <= {*range(5_000), MISSING}
    for size in (0, 15, 16, 100, 4096):
        (tmp_path / "head").write_bytes(whole[:size])
        try:
            with open_database(tmp_path / "head") as database:
                assert not len(database.integers("T", ["start"])["start"])
        except DlprofError as e:
            refused = str(e)
            assert str(tmp_path / "head") in refused


def test_a_packed_file_is_unpacked_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = exports.tables(tmp_path / "x", T=[{"start": n} for n in range(5_000)]).read_bytes()
    packed = tmp_path / "x.gz"
    packed.write_bytes(gzip.compress(data))
    assert is_sqlite(packed)
    with open_database(packed) as database:
        assert len(database.integers("T", ["start"])["start"]) == 5_000
    packed.write_bytes(gzip.compress(data)[:-3_000])
    with open_database(packed) as database:
        database.integers("T", ["start"])
        assert any("cut off" in line for line in database.damage)
    packed.write_bytes(gzip.compress(data))
    monkeypatch.setattr(limits, "LEAST_UNPACKED", 1_000)
    monkeypatch.setattr(limits, "MOST_UNPACKED", 1)
    with pytest.raises(DlprofError, match="--no-limits"), open_database(packed):
        pass


def test_more_rows_than_are_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlprof.read.columnar.database.MOST_ROWS", 10)
    with open_database(exports.tables(tmp_path / "x", T=[{"start": n} for n in range(20)])) as database:
        assert len(database.integers("T", ["start"])["start"]) == 10
        assert len(database.damage) == 1


def test_what_sqlite_computes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlprof.read.columnar.database._STEPS_LEAST", 1_000)
    monkeypatch.setattr("dlprof.read.columnar.database._STEPS_A_BYTE", 0)
    monkeypatch.setattr("dlprof.read.columnar.database._STEPS_AT_ONCE", 1_000)
    with open_database(exports.tables(tmp_path / "x", T=[{"start": n} for n in range(5_000)])) as database:
        assert len(database.integers("T", ["start"])["start"]) < 5_000
        assert "interrupted" in database.damage[0]


def test_what_is_no_sqlite_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("SQLite format 2")
    assert not is_sqlite(tmp_path / "x")
    with pytest.raises(DlprofError, match="not a SQLite file"), open_database(tmp_path / "x"):
        pass
