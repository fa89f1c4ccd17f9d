"""The comparison of counted and allocated bytes: what it adds up, what it reads of a trace, and a real script."""

from __future__ import annotations

from typing import Any

from benchmarks.allocated import left, sums
from benchmarks.memory import counted
from tests.fixtures.holding import row

ROWS = [
    row("parameter", "a", 100),
    row("parameter", "b", 20),
    row("gradient", "a", 100),
    row("activation", "a", 50),
    row("cast", "a", 30),
    row("communication", "a", 7),
    row("buffer", "a", 1_000),
]


def test_what_the_forward_pass_leaves_is_activations_copies_and_what_was_gathered() -> None:
    assert counted({"rows": ROWS}) == {
        "parameter": 120,
        "gradient": 100,
        "optimizer": 0,
        "activation": 80,
    }
    assert counted({"rows": ROWS}, "communication")["activation"] == 87


MARK = 77_777_001


def trace(*moves: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the events of moves, bytes and addresses, the last first, as a trace may have them."""
    total, events = 0, []
    for n, (size, address) in enumerate(moves):
        total += size
        events.append({"name": "[memory]", "ts": n, "args": {"Bytes": size, "Total Allocated": total, "Addr": address}})
    return [{"name": "aten::mm", "ts": 3}, *reversed(events)]


def test_marks_are_found_by_their_sizes_among_all_allocations() -> None:
    events = trace((40, 1), (MARK, 2), (-MARK, 2), (-10, 1), (MARK + 1, 2), (-MARK - 1, 2))
    assert sums(events, ["before", "gradient"]) == {"before": 40, "gradient": 30}


def test_what_a_forward_pass_leaves_is_neither_what_was_there_nor_what_is_gone() -> None:
    begin, end = ((MARK, 9), (-MARK, 9)), ((MARK + 1, 9), (-MARK - 1, 9))
    events = trace((40, 1), *begin, (100, 2), (7, 3), (-40, 1), (5, 1), (-7, 3), *end, (1_000, 4))
    assert left(events, ["forward 0", "backward 0"]) == 105
