"""NVTX ranges: their names, whoever holds them, and which are PyTorch's operators."""

from __future__ import annotations

from pathlib import Path

from dlprof.read.columnar.database import open_database
from dlprof.read.nsys import export
from tests.fixtures import exports
from tests.fixtures.exports import HOST, PID, mark, text


def test_names_stand_in_the_row_or_among_the_texts_and_operators_lose_what_is_said_of_a_call(tmp_path: Path) -> None:
    rows = [
        mark("aten::mm, op_id = 12, sizes = [[2, 3], [3, 4]]", 20, 30),
        mark("aten::mm, seq = 3, op_id = 13", 40, 50),
        {**mark("", 10, 60), "text": None, "textId": 7},
        {**mark("", 70, 80), "text": None, "textId": 8},
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
    seen = [
        (found.names[n], found.operator[n], s) for n, s in zip(found.name.tolist(), found.start.tolist(), strict=True)
    ]
    assert seen == [
        ("loading, please wait", False, 5),
        ("step 3", False, 10),
        ("aten::mm", True, 20),
        ("aten::mm", True, 40),
        ("aten::add", True, 70),
    ]
    assert found.open == 1


def test_the_file_itself_says_which_events_are_ranges(tmp_path: Path) -> None:
    types = [{"id": 159, "name": "NvtxPushPopRange"}, {"id": 59, "name": "NvtxMark"}]
    rows = [mark("a", 1, 2, kind=159), mark("b", 1, 2, kind=59)]
    path = exports.tables(tmp_path / "x", StringIds=[text(1, "")], NVTX_EVENTS=rows, ENUM_NSYS_EVENT_TYPE=types)
    with open_database(path) as database:
        found = export.read_ranges(database, None)
    assert [found.names[n] for n in found.name.tolist()] == ["a"]
    with open_database(exports.tables(tmp_path / "y", StringIds=[text(1, "")])) as database:
        assert not len(export.read_ranges(database, None).name)
