"""A .lprof and the text of line_profiler 5.1; and pickles that would run code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.read.formats import Head
from dlprof.read.profiles.line_profiler import read, recognise
from tests.fixtures.logged import GOLDEN


def lines(path: Path) -> dict[tuple[str, int], tuple[int, int]]:
    table = read(path).tables["lines"]
    rows = table[["function", "line", "hits", "dur_ns"]].itertuples(index=False)
    return {(function, line): (hits, ns) for function, line, hits, ns in rows}


def test_a_file_of_kernprof() -> None:
    assert recognise(Head(GOLDEN / "calc.lprof"))
    found = lines(GOLDEN / "calc.lprof")
    assert found["decode", 8] == (600_000, 105_109_853)
    assert found["main", 22] == (300, 218_002_226)
    assert len(found) == 10


def test_the_text_says_the_same_with_the_lines() -> None:
    path = GOLDEN / "calc-lines.txt"
    assert recognise(Head(path))
    found, exact = lines(path), lines(GOLDEN / "calc.lprof")
    assert {key: value for key, value in found.items() if value[0]}.keys() == exact.keys()
    for key, (hits, ns) in exact.items():
        assert found[key][0] == hits
        assert abs(found[key][1] - ns) <= 51  # a tenth of a microsecond is written
    source = read(path).tables["lines"].set_index(["function", "line"])["source"]
    assert source["decode", 8] == "        total += k * k % 7"
    assert found["decode", 5] == (0, 0)


class Runs:
    """Pickled, it would call a function when it is read."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_that_a_pickle_names_is_called(protocol: int, tmp_path: Path) -> None:
    hint = "line_profiler.line_profiler LineStats"
    for evil in (Runs(os.mkdir, str(tmp_path / "made")), Runs(eval, "1"), Runs(getattr, "x", "upper")):
        (tmp_path / "x").write_bytes(pickle.dumps((hint, evil), protocol))
        with pytest.raises(DlprofError):
            read(tmp_path / "x")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04N.",
        b"\x80\x04}.",
        b"\x80\x04r\xff\xff\xff\xff.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
        b"cline_profiler\nLineStats\n.",
        b"cline_profiler\nLineStats\n(}(S'timings'\n(lS'unit'\nI1\nuoR.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_a_damaged_or_hostile_pickle_is_never_more_than_an_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DlprofError):
        read(tmp_path / "x")


def test_a_damaged_byte_is_never_more_than_an_error(tmp_path: Path) -> None:
    data = (GOLDEN / "calc.lprof").read_bytes()
    for at in range(len(data)):
        for flip in (0x01, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            (tmp_path / "x").write_bytes(damaged)
            try:
                read(tmp_path / "x")
            except DlprofError:
                continue


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"Timer unit: 1 s", b"text"])
def test_other_files_are_none(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    assert not recognise(Head(tmp_path / "x"))
