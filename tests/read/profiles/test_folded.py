"""Folded stacks, of files that py-spy 0.4 and austin 3.7 recorded and of ones written by hand."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.formats import Head
from dlprof.read.profiles.folded import read, recognise
from tests.fixtures.logged import GOLDEN


def test_stacks_of_py_spy_with_threads(tmp_path: Path) -> None:
    path = GOLDEN / "pyspy.raw.txt"
    assert recognise(Head(path))
    reading = read(path)
    table = reading.tables["stacks"]
    assert reading.facts["profile pyspy.raw.txt"] == {"tool": "py-spy", "unit": "samples"}
    # A thread that is in no Python has no frame.
    whole = sum(int(line.rpartition(" ")[2]) for line in path.read_text().splitlines() if ";" in line)
    assert table["samples"].sum() == whole
    fetch = table[(table["phase"] == "fetch") & table["stack"].str.contains("decode \\(train.py")]
    assert fetch["samples"].sum() > 100
    assert {"main", "thread"} == set(table["role"])


def test_times_of_austin() -> None:
    path = GOLDEN / "calc.austin.txt"
    assert recognise(Head(path))
    reading = read(path)
    table = reading.tables["stacks"]
    assert reading.facts["profile calc.austin.txt"] == {"tool": "austin", "unit": "ns"}
    assert set(table["thread"]) == {"MainThread"}
    # By hand: the µs of the lines whose innermost frame is in decode.
    lines = [
        line
        for line in path.read_text().splitlines()
        if line.rpartition(";")[2].startswith("/home/user/job/calc.py:decode")
    ]
    expected = sum(int(line.rpartition(" ")[2]) for line in lines) * 1000
    assert expected > 0
    inside = table[table["stack"].str.fullmatch(r".*;decode \(/home/user/job/calc\.py:\d+\)")]
    assert inside["samples"].sum() == expected


def test_the_script_of_flame_graphs(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("java;start_thread;[unknown] 3\njava;main thread;run 12\njava;main thread;run 1\n")
    assert recognise(Head(tmp_path / "x"))
    table = read(tmp_path / "x").tables["stacks"]
    assert sorted(table["samples"]) == [3, 13]


def test_a_cut_end_and_nonsense_lose_themselves_alone(tmp_path: Path) -> None:
    text = "a (t.py:1);b (t.py:2) 7\n" * 3
    (tmp_path / "x").write_text(text + "a (t.py:1);b (t.")
    assert read(tmp_path / "x").tables["stacks"]["samples"].sum() == 21
    assert read(tmp_path / "x").warnings == ()
    (tmp_path / "x").write_text(text + "nonsense\n\nnonsense\n")
    assert len(read(tmp_path / "x").warnings) == 1


@pytest.mark.parametrize(
    "text", ["", "\0\0\0", "Some text with 12\nand more; of it\n", "import os; import sys\nx = 5\n", "{}", "a,b\n1,2\n"]
)
def test_other_files_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    assert not recognise(Head(tmp_path / "x"))
    if " 12" not in text and " 5" not in text:
        with pytest.raises(DlprofError):
            read(tmp_path / "x")


@pytest.mark.parametrize(
    "line", ["a" + " " * 100_000 + "b 1", "( " * 50_000 + ") 1", ":" * 100_000 + " 1", "P1;T1;" + ":" * 100_000 + " 1"]
)
def test_a_long_line_takes_no_longer_than_it_is_long(line: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text((line + "\n") * 3)
    recognise(Head(tmp_path / "x"))
    with suppress(DlprofError):
        read(tmp_path / "x")
