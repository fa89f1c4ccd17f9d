"""Clocks are means over the readings in which a GPU was not idle, by what held them down."""

from pathlib import Path

import pytest

from dlprof.analysis.machine.clocks import clocks
from tests.fixtures import runs
from tests.fixtures.readings import NORMAL, clocked


def test_each_reason_has_its_share_and_its_clock(tmp_path: Path) -> None:
    read = [
        NORMAL | {"clock_reasons_bits": 0},
        NORMAL | {"sm_clock_mhz": 1_000, "clock_reasons_bits": 0x24},
        NORMAL | {"sm_clock_mhz": 200, "clock_reasons_bits": 0x1},
        NORMAL | {"sm_clock_mhz": 1_400, "clock_reasons_bits": 0x4},
    ]
    run = runs.measured(clocked(tmp_path, *read), clocks)
    (row,) = run.frame(clocks).to_dict("records")
    assert row["clock_mhz"] == pytest.approx(1_400, rel=0.03)
    assert (row["free_mhz"], row["heat_mhz"], row["power_cap_mhz"]) == (1_800, 1_000, pytest.approx(1_200, rel=0.03))
    assert row["heat"] == pytest.approx(1 / 3, abs=0.03)
    assert (row["power_brake"], row["max_mhz"], row["limit_w"]) == (0, 1_980, 700)
