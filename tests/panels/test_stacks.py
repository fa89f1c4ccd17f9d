"""The table of the functions that were seen most."""

from __future__ import annotations

from pathlib import Path

from dlprof.overview import drawn
from dlprof.panels.stacks import PICTURE
from tests.measures.test_stacks import MS, SEEN, run
from tests.runs import CPU, light, measured, recorded


def test_the_users_functions_come_first_with_what_libraries_do_for_them(tmp_path: Path) -> None:
    _, panel = drawn(measured(run(tmp_path, SEEN, SEEN), *PICTURE.needs), [PICTURE])
    assert panel.rows == (
        ("between the phases", "log (log.py:9)", "yours", "100 %", "100 %"),
        ("between the phases", "dumps (json/__init__.py:2)", "library", "17 %", "17 %"),
        ("waiting for the loader", "run (train.py:3)", "yours", "100 %", "100 %"),
        ("waiting for the loader", "wait (threading.py:9)", "library", "100 %", "100 %"),
        ("loader worker", "decode (data.py:4)", "yours", "80 %", "80 %"),
        ("loader worker", "read (data.py:2)", "yours", "20 %", "100 %"),
    )


def test_a_run_without_stacks_has_no_panel(tmp_path: Path) -> None:
    made = measured(recorded(tmp_path, (None, [light(n, 10 * MS) for n in range(5)], CPU)), *PICTURE.needs)
    assert drawn(made, [PICTURE]) == ()


def test_the_flame_graph_puts_the_calls_of_all_ranks_together(tmp_path: Path) -> None:
    panel, _ = drawn(measured(run(tmp_path, SEEN, SEEN), *PICTURE.needs), [PICTURE])
    assert panel.shape == "flame"
    assert panel.rows[:3] == (
        (0, 0, 72, "between the phases", "host"),
        (0, 72, 80, "waiting for the loader", "input_wait"),
        (0, 152, 200, "loader worker", "worker"),
    )
    assert (1, 0, 72, "run (train.py)", "own") in panel.rows
    assert (3, 0, 12, "dumps (json/__init__.py)", "library") in panel.rows
    assert (3, 152, 160, "decode (data.py)", "own") in panel.rows
