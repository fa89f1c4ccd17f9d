"""Tasks are taken once, messages come in the file's order, and who ends early is missed."""

import os

import pytest

from dlprof.read.kineto.split.boundaries import Span
from dlprof.read.kineto.split.decoding import IN_FILE, MOST_SPANS, Done, Table, Task

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


def span(number: int) -> Span:
    return Span(number * 10, number * 10 + 9, number * 10 + 10)


def in_child(table: Table, work: object) -> None:
    """Fork a process that does something with the table, and wait for its end."""
    pid = os.fork()
    if not pid:
        try:
            work()  # type: ignore[operator]
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_all_tasks_fit_and_each_is_taken_once() -> None:
    table = Table(1)
    put = [Task(n, IN_FILE, span(n)) for n in range(MOST_SPANS)]
    for task in put:
        table.put(task)

    def work() -> None:
        table.leave(decodes=True)
        n = 0
        while task := table.take():
            assert task == put[n]
            table.lay_down(0, Done(n, task.span, None))
            n += 1
        table.lay_down(0, None)

    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    table.leave()
    assert [done.span for done in table.done()] == [task.span for task in put]
    assert not table.lost
    os.waitpid(pid, 0)
    table.close()


def test_messages_come_in_order_up_to_a_gap() -> None:
    table = Table(2)

    def work() -> None:
        table.leave(decodes=True)
        for number in (2, 0, 1, 4):
            table.lay_down(1, Done(number, span(number), str(number).encode()))

    in_child(table, work)
    table.leave()
    assert [(done.number, done.made) for done in table.done()] == [(0, b"0"), (1, b"1"), (2, b"2")]
    assert table.lost
    table.close()


def test_rooms_are_used_again_and_nobody_waits_for_one_that_nobody_frees() -> None:
    table = Table(2, rooms=2)
    assert sorted((table.free_room(), table.free_room())) == [0, 1]  # type: ignore[type-var]
    table.free(1)
    assert table.free_room() == 1
    table.room(1)[:3] = b"abc"
    assert bytes(table.room(1)[:3]) == b"abc"
    assert bytes(table.room(0)[:3]) == b"\0\0\0"
    table.leave(unpacks=True)  # nobody else is there
    assert table.free_room() is None


def test_once_closed_nothing_is_taken() -> None:
    table = Table(1, rooms=1)
    table.put(Task(0, 0, span(0)))
    table.close()
    assert table.take() is None
    assert table.free_room() is None
    table.close()
