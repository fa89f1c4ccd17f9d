"""The table of the functions that were seen most."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.panel import drawn
from dlprof.analysis.panels.host import STACKS_PICTURE
from tests.fixtures.hosts import SEEN, with_stacks
from tests.fixtures.runs import CPU, MS, light, measured, recorded


def test_the_users_functions_come_first_with_what_libraries_do_for_them(tmp_path: Path) -> None:
    _, panel = drawn(measured(with_stacks(tmp_path, SEEN, SEEN), STACKS_PICTURE.draw), [STACKS_PICTURE])
    assert panel.columns[3:] == ("in it_share", "with what it calls_share")
    assert panel.rows == (
        ("between the phases", "log (log.py:9)", "yours", 1, 1),
        ("between the phases", "dumps (json/__init__.py:2)", "library", pytest.approx(1 / 6), pytest.approx(1 / 6)),
        ("waiting for the loader", "run (train.py:3)", "yours", 1, 1),
        ("waiting for the loader", "wait (threading.py:9)", "library", 1, 1),
        ("loader worker", "decode (data.py:4)", "yours", 0.8, 0.8),
        ("loader worker", "read (data.py:2)", "yours", 0.2, 1),
    )


def test_a_run_without_stacks_has_no_panel(tmp_path: Path) -> None:
    made = measured(recorded(tmp_path, (None, [light(n, 10 * MS) for n in range(5)], CPU)), STACKS_PICTURE.draw)
    assert drawn(made, [STACKS_PICTURE]) == ()


def test_the_flame_graph_puts_the_calls_of_all_ranks_together(tmp_path: Path) -> None:
    panel, _ = drawn(measured(with_stacks(tmp_path, SEEN, SEEN), STACKS_PICTURE.draw), [STACKS_PICTURE])
    assert panel.shape == "flame"
    assert panel.rows[:3] == (
        (0, 0, 72, "between the phases", "host"),
        (0, 72, 80, "waiting for the loader", "input_wait"),
        (0, 152, 200, "loader worker", "worker"),
    )
    assert (1, 0, 72, "run (train.py)", "own") in panel.rows
    assert (3, 0, 12, "dumps (json/__init__.py)", "library") in panel.rows
    assert (3, 152, 160, "decode (data.py)", "own") in panel.rows
