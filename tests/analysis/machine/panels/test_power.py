"""The table of power limits: a row each, with time and energy, and what was assumed."""

from pathlib import Path

import pytest

from dlprof.analysis.machine.panels.power import draw
from dlprof.analysis.machine.power import power_limits, power_model
from dlprof.analysis.throughput.rates import throughput
from tests.fixtures import runs
from tests.fixtures.readings import NORMAL, clocked
from tests.fixtures.runs import MS, asked


def test_a_row_for_each_limit(tmp_path: Path) -> None:
    path = clocked(tmp_path, {**NORMAL, "power_w": 700.0})
    (panel,) = asked(runs.measured(path, power_model, power_limits, throughput), draw)
    assert panel.columns[-1] == "energy of a step, J"  # nobody counted its samples
    assert [row[0] for row in panel.rows] == [1.0, 0.9, 0.8, 0.7]
    assert [row[1] for row in panel.rows] == pytest.approx([700, 630, 560, 490])
    assert panel.rows[0][2:] == pytest.approx((10 * MS, 10 * MS, 10 * MS, 7))
    steps = [row[2] for row in panel.rows]
    assert steps == sorted(steps)
    assert all(row[3] <= row[2] <= row[4] for row in panel.rows)
    assert "assumed" in panel.note
