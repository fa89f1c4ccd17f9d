"""The table of the user's lines: by phase, the phase that takes most first."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.panels.source import PICTURE
from dlprof.errors import NotMeasured
from tests.fixtures.runs import called
from tests.fixtures.sampled_stacks import LOADER, MAIN, stacked


def test_lines_are_those_of_the_users_by_phase(tmp_path: Path) -> None:
    path = stacked(
        tmp_path,
        f"{MAIN};main (/w/train.py:68) 60\n",
        f"{MAIN};main (/w/train.py:69) 30\n",
        f"{MAIN};main (/w/train.py:70) 2\n",
        f"{MAIN};main (/w/train.py:61);{LOADER};decode (/w/data.py:7) 108\n",
        f"{MAIN};run (/lib/python3.11/site-packages/fancy/cli.py:3) 10\n",
    )
    (panel,) = called(path, PICTURE.draw)
    assert panel.shape == "table"
    assert [(row[0], row[1], row[4], row[5]) for row in panel.rows] == [
        ("waiting for the loader", "/w/data.py:7", 1.0, 108 / 210),
        ("between the phases", "/w/train.py:68", 60 / 102, 60 / 210),
        ("between the phases", "/w/train.py:69", 30 / 102, 30 / 210),
    ]


def test_a_line_that_was_hardly_seen_is_no_row(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured):
        called(stacked(tmp_path, f"{MAIN};main (/w/train.py:68) 2\n"), PICTURE.draw)
