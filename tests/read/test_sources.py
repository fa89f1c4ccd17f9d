"""The list of sources: names, files and tables fit together, and nothing heavy is imported before a file is read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.formats import formats
from dlprof.read.sources import SOURCES
from tests.fixtures import jobs


def test_every_table_has_a_source_and_no_two_sources_read_one_file() -> None:
    ours = {table for source in SOURCES for table in source.tables}
    assert ours | {table for one in formats() for table in one.tables} == set(schema.TABLES)
    assert len({source.name for source in SOURCES}) == len(SOURCES)
    files = [file for source in SOURCES for file in source.files]
    assert len(set(files)) == len(files)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_a_missing_file_is_one_line_and_another_one_is_refused(source: object, tmp_path: Path) -> None:
    (of,) = (one for one in SOURCES if one is source)
    assert of.absent
    with pytest.raises(DlprofError, match="no such file"):
        of.read(tmp_path / "none")
    (tmp_path / "other").write_text("not\na\nlog\n")
    with pytest.raises(DlprofError):
        of.read(tmp_path / "other")


def test_a_source_reads_the_tables_that_it_names(tmp_path: Path) -> None:
    rows = {
        "stalls": {"kind": "checkpoint", "start_ns": 1, "dur_ns": 2, "step": 3},
        "steps": {"step": 0, "start_ns": 1, "dur_ns": 2},
        "gpu": {"at_ns": 1, "power_w": 300},
    }
    for source in (one for one in SOURCES if one.name in rows):
        (tmp_path / source.files[0]).write_text(json.dumps(rows[source.name]) + "\n")
        reading = source.read(tmp_path / source.files[0])
        assert tuple(reading.tables) == source.tables
        assert [len(table) for table in reading.tables.values()] == [1]


def test_the_list_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; import dlprof.read.run; print([m for m in ('numpy', 'pandas', 'msgspec') if m in sys.modules])"
    assert jobs.launch([sys.executable, "-c", code], tmp_path).stdout == "[]\n"
