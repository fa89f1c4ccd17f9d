"""A profile of cProfile, and ones by hand whose times are known."""

from __future__ import annotations

import marshal
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.read.formats import Head
from dlprof.read.profiles.pstats import read, recognise
from tests.fixtures.logged import GOLDEN

MAIN, F, G = ("t.py", 1, "main"), ("t.py", 5, "f"), ("t.py", 9, "g")


def written(folder: Path, stats: Any) -> Path:
    (folder / "p").write_bytes(marshal.dumps(stats))
    return folder / "p"


def test_a_file_of_cprofile() -> None:
    path = GOLDEN / "calc.prof"
    assert recognise(Head(path))
    reading = read(path)
    functions, stacks = reading.tables["functions"], reading.tables["stacks"]
    decode = functions[(functions["function"] == "decode") & (functions["file"] == "calc.py")].iloc[0]
    known = marshal.loads(path.read_bytes())["calc.py", 5, "decode"]
    assert (decode["calls"], decode["own_ns"]) == (300, round(known[2] * 1e9))
    # All of decode is called by main. exec runs both the script and what it imports: dividing its time is an estimate.
    inside = stacks[stacks["stack"].str.endswith("main (calc.py:20);decode (calc.py:5)")]
    assert inside["samples"].sum() == pytest.approx(known[2] * 1e9, rel=0.05)
    assert stacks["samples"].sum() == pytest.approx(functions["own_ns"].sum(), rel=0.05)


def test_a_functions_time_is_divided_among_its_callers(tmp_path: Path) -> None:
    stats = {
        MAIN: (1, 1, 1.0, 10.0, {}),
        F: (2, 2, 2.0, 5.0, {MAIN: (2, 2, 2.0, 5.0)}),
        # 3 s below f and 4 s below main itself
        G: (7, 7, 7.0, 7.0, {F: (3, 3, 3.0, 3.0), MAIN: (4, 4, 4.0, 4.0)}),
    }
    table = read(written(tmp_path, stats)).tables["stacks"]
    found = {s: n / 1e9 for s, n in zip(table["stack"], table["samples"], strict=True)}
    main, f, g = "main (t.py:1)", "f (t.py:5)", "g (t.py:9)"
    assert found == {main: 1.0, f"{main};{f}": 2.0, f"{main};{f};{g}": 3.0, f"{main};{g}": 4.0}


def test_recursion_ends(tmp_path: Path) -> None:
    stats = {
        MAIN: (1, 1, 0.0, 3.0, {}),
        F: (1, 9, 1.0, 3.0, {MAIN: (1, 1, 0.5, 3.0), F: (8, 8, 0.5, 2.0), G: (1, 1, 0.1, 0.2)}),
        G: (2, 2, 2.0, 2.5, {F: (2, 2, 2.0, 2.5)}),
    }
    table = read(written(tmp_path, stats)).tables["stacks"]
    assert 0 < table["samples"].sum() <= 3.5e9


@pytest.mark.parametrize(
    "stats",
    [
        {},
        {1: 2},
        {MAIN: (1, 1, float("nan"), 1.0, {})},
        {MAIN: (1, 1, 1.0)},
        {MAIN: (1, "x", 1.0, 1.0, {})},
        {MAIN: (1, 1, 1e300, 1e300, {MAIN: 5})},
        [],
    ],
)
def test_what_is_no_such_profile_is_refused(stats: Any, tmp_path: Path) -> None:
    with pytest.raises(DlprofError):
        read(written(tmp_path, stats))


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes((GOLDEN / "calc.prof").read_bytes()[:999])
    with pytest.raises(DlprofError, match="not a whole profile"):
        read(tmp_path / "p")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"a": 1}', b"\x80\x04}."])
def test_other_files_are_none(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(data)
    assert not recognise(Head(tmp_path / "p"))
