"""A binary file that austin 3.7 recorded, and what is damaged of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.formats import Head
from dlprof.read.profiles.mojo import read, recognise
from tests.fixtures.logged import GOLDEN

FILE = GOLDEN / "calc.mojo"


def test_a_file_of_austin() -> None:
    assert recognise(Head(FILE))
    reading = read(FILE)
    table = reading.tables["stacks"]
    assert reading.warnings == ()
    assert set(table["thread"]) == {"MainThread"}
    inside = table[table["stack"].str.contains(r";main \(/home/user/job/calc\.py:22\);decode \(")]
    # mojo2austin of austin-python gives the same sum.
    assert table["samples"].sum() == 159_902_000
    assert inside["samples"].sum() > 0.5 * table["samples"].sum()


@pytest.mark.parametrize("cut", [4, 40, 300, 3000, 5900])
def test_a_cut_file_gives_what_is_before_the_cut(cut: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(FILE.read_bytes()[:cut])
    try:
        reading = read(tmp_path / "x")
    except DlprofError:
        assert cut < 3000
    else:
        assert cut >= 300
        assert 0 < reading.tables["stacks"]["samples"].sum() <= 159_902_000


@pytest.mark.parametrize("at", range(4, 400, 13))
def test_a_damaged_byte_is_never_more_than_an_error(at: int, tmp_path: Path) -> None:
    data = bytearray(FILE.read_bytes())
    data[at] ^= 0xFF
    (tmp_path / "x").write_bytes(data)
    with suppress(DlprofError):
        assert len(read(tmp_path / "x").tables["stacks"])


def test_version_4_repeats_a_threads_stack_and_tasks_that_wait_are_none(tmp_path: Path) -> None:
    def text(word: str) -> bytes:
        return word.encode() + b"\0"

    names = b"".join(b"\x0b" + bytes([key]) + text(word) for key, word in ((1, "a.py"), (2, "main"), (3, "read")))
    frames = b"".join(b"\x03" + bytes([key, 1, name, 7, 7, 0, 0]) for key, name in ((8, 2), (9, 3)))
    first = b"\x02\x05\x00" + text("5") + names + frames + b"\x05\x08\x05\x09\x09\x0a"  # main, read: 10 µs
    task = b"\x0e\x11\x00\x05\x08\x09\x3f" + b"\x0f\x11\x12"  # a task is suspended in main
    again = b"\x02\x05\x00" + text("5") + b"\x0d\x09\x14"  # the same: 20 µs
    other = b"\x02\x05\x00" + text("6") + b"\x05\x08\x09\x01"
    (tmp_path / "x").write_bytes(b"MOJ\x04\x01" + text("mode") + text("wall") + first + task + again + other)
    reading = read(tmp_path / "x")
    table = reading.tables["stacks"].astype({"stack": str, "thread": str})
    assert reading.warnings == ()
    found = {(thread, stack): ns for thread, stack, ns in table[["thread", "stack", "samples"]].itertuples(index=False)}
    assert found == {
        ("MainThread", "main (a.py:7);read (a.py:7)"): 30_000,
        ("0:6", "main (a.py:7)"): 1_000,
    }


def test_a_later_version_is_refused_with_what_reads_it(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"MOJ\x09" + FILE.read_bytes()[4:])
    with pytest.raises(DlprofError, match="mojo2austin"):
        read(tmp_path / "x")


@pytest.mark.parametrize("data", [b"", b"MOJ", b"MOJO", b"MO"])
def test_other_files_are_none(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    assert not recognise(Head(tmp_path / "x")) or data == b"MOJO"
    with pytest.raises(DlprofError):
        read(tmp_path / "x")
