"""Rows of flame graphs stand each function under its caller."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.host.profiles import flame_rows

TREE = pd.DataFrame(
    [("", -1, "main (t.py)", 9, True), ("", 0, "f (t.py)", 3, True), ("", 0, "g (t.py)", 5, True)],
    columns=["doing", "parent", "name", "samples", "own"],
).assign(rank=0)


def test_the_widest_stand_first_with_what_was_done_below() -> None:
    rows = flame_rows(TREE, {"": "all"}, {"": "host"})
    assert rows == (
        (0, 0, 9, "all", "host"),
        (1, 0, 9, "main (t.py)", "own"),
        (2, 0, 5, "g (t.py)", "own"),
        (2, 5, 3, "f (t.py)", "own"),
    )


def test_without_what_was_done() -> None:
    assert [row[0] for row in flame_rows(TREE, {"": "all"}, {"": "host"}, rooted=False)] == [0, 1, 1]


def test_ranks_are_added_up() -> None:
    both = pd.concat([TREE, TREE.assign(rank=1)])
    assert [row[2] for row in flame_rows(both, {"": "all"}, {"": "host"})] == [18, 18, 10, 6]
