"""Lowered clocks: found for heat, a setting or a lowered limit; a normal power limit is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.machine.rules.throttled_clock import RULE
from tests.fixtures import readings, runs
from tests.fixtures.asking import ask
from tests.fixtures.readings import NORMAL, clocked
from tests.fixtures.runs import MS


def test_heat_is_measured_by_what_the_same_gpu_has_without(tmp_path: Path) -> None:
    hot = NORMAL | {"sm_clock_mhz": 900, "clock_reasons_bits": 0x24}
    free = NORMAL | {"clock_reasons_bits": 0}
    found = ask(RULE, clocked(tmp_path, free, hot))
    assert (found.state, "too hot" in found.title) == ("found", True)
    # 1,350 MHz in the mean, of 1,800.
    assert found.saving_ns == pytest.approx(10 * MS * 0.25, rel=0.05)
    assert found.ranks == (0,)
    assert found.evidence is not None
    assert found.evidence.rows[0][0] == "rank 0"
    assert found.evidence.rows[0][1:4] == (pytest.approx(1_350, rel=0.02), 1_980, pytest.approx(0.5, abs=0.015))


def test_a_gpu_that_is_always_hot_is_measured_by_its_maximum(tmp_path: Path) -> None:
    found = ask(RULE, clocked(tmp_path, NORMAL | {"sm_clock_mhz": 990, "clock_reasons_bits": 0x40}))
    assert found.saving_ns == pytest.approx(10 * MS * 0.5, rel=0.02)


def test_a_clock_that_was_set_names_the_way_back(tmp_path: Path) -> None:
    found = ask(RULE, clocked(tmp_path, NORMAL | {"sm_clock_mhz": 1_485, "clock_reasons_bits": 0x2}))
    assert found.share == pytest.approx(0.25, rel=0.02)
    assert "nvidia-smi -rgc" in found.advice[0]


def test_a_clock_that_stands_still_far_below_its_maximum_was_locked(tmp_path: Path) -> None:
    locked = NORMAL | {"sm_clock_mhz": 1_200, "clock_reasons_bits": 0}
    found = ask(RULE, clocked(tmp_path, locked))
    assert (found.state, "far below its maximum" in found.title) == ("found", True)
    assert found.share == pytest.approx(1 - 1_200 / 1_980, rel=0.02)
    assert found.advice[0].startswith("`nvidia-smi -rgc`")


@pytest.mark.parametrize(
    "read",
    [
        ({"sm_clock_mhz": 1_750},),  # a GPU that names more than it reaches
        ({"sm_clock_mhz": 1_200}, {"sm_clock_mhz": 1_400}),  # it comes and goes with the load
        ({"sm_clock_mhz": 1_200}, {"sm_clock_mhz": 1_200, "clock_reasons_bits": 0x4}),  # for its power limit
    ],
)
def test_a_clock_that_moves_or_is_nearly_the_highest_was_not_locked(tmp_path: Path, read: Any) -> None:
    path = clocked(tmp_path, *(NORMAL | {"clock_reasons_bits": 0} | r for r in read))
    assert ask(RULE, path).state == "clear"


def test_a_lowered_limit_costs_the_cube_root(tmp_path: Path) -> None:
    found = ask(RULE, clocked(tmp_path, NORMAL | {"sm_clock_mhz": 1_400, "power_limit_w": 350}))
    # Twice the power would give 2^(1/3) times the clock.
    assert found.share == pytest.approx(1 - 2 ** (-1 / 3), rel=0.02)
    assert found.advice == ("`nvidia-smi -pl 700` (is 350 W)",)
    assert found.evidence is not None
    assert all(cell is None or isinstance(cell, float) for cell in found.evidence.rows[0][1:])


def test_a_normal_power_limit_and_an_idle_gpu_are_left_alone(tmp_path: Path) -> None:
    idle = NORMAL | {"sm_clock_mhz": 210, "clock_reasons_bits": 0x1}
    clear = ask(RULE, clocked(tmp_path, NORMAL | {"sm_clock_mhz": 1_300}, idle))
    assert (clear.state, "normal power limit" in clear.summary, clear.share) == ("clear", True, 0.0)


def test_a_little_heat_is_left_alone(tmp_path: Path) -> None:
    hot = NORMAL | {"sm_clock_mhz": 1_750, "clock_reasons_bits": 0x20}
    clear = ask(RULE, clocked(tmp_path, NORMAL | {"clock_reasons_bits": 0}, hot))
    # 1,775 MHz in the mean, of 1,800.
    assert clear.state == "clear"
    assert clear.share == pytest.approx(25 / 1_800, rel=0.05)
    assert clear.ranks == (0,)


def test_a_log_of_nvidia_smi_beside_a_trace_tells_as_well(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path / "traces", readings.computing())
    header = "timestamp, pci.bus_id, clocks.sm [MHz], clocks.max.sm [MHz], clocks_event_reasons.active"
    lines = [f"2025/01/01 00:00:{n:02d}.000, 00000000:3B:00.0, 990 MHz, 1980 MHz, 0x0000000000000040" for n in range(9)]
    (path / "smi.csv").write_text("\n".join([header, *lines]) + "\n")
    found = ask(RULE, path)
    assert (found.state, found.ranks) == ("found", ())
    assert "00000000:3B:00.0" in found.summary
    assert found.share == pytest.approx(0.5, rel=0.02)


def test_without_clocks_or_a_gpu_it_abstains(tmp_path: Path) -> None:
    assert "on the CPU" in ask(RULE, clocked(tmp_path / "cpu", NORMAL, facts=dict(runs.CPU))).why
    unread = ask(RULE, clocked(tmp_path / "unread", {"power_w": 300.0}))
    assert (unread.state, "clock was read" in unread.why) == ("not_measured", True)
