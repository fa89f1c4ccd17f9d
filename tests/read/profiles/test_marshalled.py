"""marshal's data of plain values, as Python's own writer makes it."""

from __future__ import annotations

import marshal
from typing import Any

import pytest

from dlprof.read.profiles.pstats import DamagedError, loads

PLAIN: list[Any] = [
    {("a.py", 1, "f"): (1, 2, 0.5, 1.5, {("b.py", 2, "ü"): (1, 1, 0.25, 0.5)})},
    [1, -1, 2**31, 2**62, -(2**40), 0.1, "x" * 300, "é漢", (), (1,) * 300, None, True, False],
]


@pytest.mark.parametrize("version", range(5))
@pytest.mark.parametrize("value", PLAIN)
def test_it_reads_what_python_writes(value: Any, version: int) -> None:
    assert loads(marshal.dumps(value, version)) == value


@pytest.mark.parametrize("value", [compile("1", "x", "eval"), {1, 2}, 1j, Ellipsis])
def test_anything_else_than_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(DamagedError):
        loads(marshal.dumps(value))


def test_no_cut_and_no_damage_does_more_than_raise() -> None:
    data = marshal.dumps(PLAIN[0])
    for at in range(len(data)):
        with pytest.raises(DamagedError):
            loads(data[:at])
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            try:
                loads(bytes(damaged))
            except DamagedError:
                continue


@pytest.mark.parametrize(
    "data", [b"(\xff\xff\xff\x7f", b"[" * 100, b"s\xff\xff\xff\x7fx", b"l\xff\xff\x00\x00", b"r\x05\x00\x00\x00"]
)
def test_a_size_in_the_file_allocates_nothing(data: bytes) -> None:
    with pytest.raises(DamagedError):
        loads(data)
