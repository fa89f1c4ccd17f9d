"""Autograd's numbers are read where a module is named, wherever in the file that is."""

from __future__ import annotations

import pickle

import msgspec
import numpy as np
import pytest

from dlprof.read.kineto.autograd import Made, Numbers

OPERATOR = b'{"External id": 3, "Sequence number": 7, "Fwd thread id": 0}'
FUNCTION = b'{\n  "Sequence number": 7,\n  "Fwd thread id": 2\n}'
PLAIN = b'{"External id": 4}'


def add(numbers: Numbers, rows: list[int], runs: list[bool], *args: bytes, wanted: bool) -> None:
    numbers.add(np.array(rows), np.array(runs, dtype=bool), [msgspec.Raw(one) for one in args], wanted)


def rows_of(made: Made) -> list[tuple[int, int, int]]:
    return list(zip(made.row.tolist(), made.number.tolist(), made.maker.tolist(), strict=True))


@pytest.mark.parametrize("wanted", [(False, False), (False, True), (True, True)])
def test_the_same_is_read_at_once_and_later(wanted: tuple[bool, bool]) -> None:
    numbers = Numbers()
    add(numbers, [0, 2, 5], [False, False, True], OPERATOR, PLAIN, FUNCTION, wanted=wanted[0])
    add(numbers, [9], [False], OPERATOR, wanted=wanted[1])
    made = numbers.end(True)
    assert sorted(rows_of(made)) == [(0, 7, 0), (5, 7, 2), (9, 7, 0)]
    assert [str(column.dtype) for column in made] == ["int64", "int64", "int32"]


def test_nothing_is_read_that_is_not_wanted() -> None:
    numbers = Numbers()
    add(numbers, [0], [False], OPERATOR, wanted=False)
    assert rows_of(numbers.end(False)) == []


def test_what_another_process_read_follows() -> None:
    numbers, other = Numbers(), Numbers()
    add(numbers, [1], [False], OPERATOR, wanted=False)
    add(other, [0], [True], FUNCTION, wanted=True)
    add(other, [1], [False], OPERATOR, wanted=False)
    numbers.join(pickle.loads(pickle.dumps(other)), 10)
    assert sorted(rows_of(numbers.end(True))) == [(1, 7, 0), (10, 7, 2), (11, 7, 0)]


@pytest.mark.parametrize(("odd", "found"), [(b'{"Sequence number": 5, "x": NaN}', [(0, 5, 0), (1, 7, 0)]), (b"\0", [])])
def test_args_that_are_no_json_cost_no_more_than_their_chunk(odd: bytes, found: list[tuple[int, int, int]]) -> None:
    numbers = Numbers()
    add(numbers, [0, 1], [False, False], odd, OPERATOR, wanted=False)
    assert rows_of(numbers.end(True)) == found
