"""The table of the whole job: each part once, as the ranks' mean, with its share."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.panels.step import WHOLE_JOB_PICTURE
from dlprof.errors import NotMeasured
from tests.fixtures import runs
from tests.fixtures.runs import MS

S = 1_000 * MS


def steps(length: int, validated: int) -> list[dict[str, object]]:
    made = [runs.light(n, length) for n in range(40)]
    for n in range(20, 20 + validated):
        made[n]["kind"] = "validation"
    return made


def test_parts_are_means_of_the_ranks_and_shares_of_the_job(tmp_path: Path) -> None:
    stalls = [[runs.stall("checkpoint", 5, 800 * MS)], []]
    path = runs.recorded(tmp_path, (None, steps(S, 8), runs.CPU), (None, steps(S, 4), runs.CPU), stalls=stalls)
    (panel,) = runs.called(path, WHOLE_JOB_PICTURE.draw)
    assert [row[0] for row in panel.rows] == [
        "training, warming up",
        "training, steady",
        "validation",
        "of it saving checkpoints",
    ]
    assert [row[1] for row in panel.rows] == [3, 31, 6, 0.5]
    assert panel.rows[1][3] == pytest.approx(31 / 40)
    assert panel.rows[2][3] == pytest.approx(6 / 40)
    assert panel.rows[3][2:] == (400 * MS, pytest.approx(0.01))
    assert panel.note.startswith("Means over 2 ranks.")


def test_a_job_of_nothing_but_steady_steps_has_no_such_table(tmp_path: Path) -> None:
    run = runs.measured(runs.recorded(tmp_path, (None, [runs.light(0, S)], runs.CPU)), WHOLE_JOB_PICTURE.draw)
    with pytest.raises(NotMeasured, match="steady"):
        run.call(WHOLE_JOB_PICTURE.draw)
