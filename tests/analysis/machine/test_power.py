"""What a lower power limit costs: beside figures made from known laws, and simulated jobs with lower clocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.machine.power import K_RANGE, PowerModel, power_limits, power_model
from dlprof.errors import DoesNotApply, NotMeasured
from simulator import folder
from simulator.faults.fault import base
from simulator.hardware import DEVICES, clock_at
from simulator.job import Recording
from simulator.play import true
from tests.fixtures import runs
from tests.fixtures.readings import NORMAL, clocked
from tests.fixtures.runs import MS

BUSY = {**NORMAL, "power_w": 700.0}


def model(path: Path) -> PowerModel:
    found: PowerModel = runs.measured(path, power_model).frame(power_model)
    return found


def cooling(k: float) -> list[dict[str, float]]:
    """Return readings of a GPU whose clock falls for heat alone, and its power by a law of this exponent."""
    return [
        {**NORMAL, "sm_clock_mhz": mhz, "clock_reasons_bits": 0x20, "power_w": 600.0 * (mhz / 1_800) ** k}
        for mhz in (1_800, 1_700, 1_600, 1_500, 1_400)
    ]


def test_a_gpu_at_its_limit_slows_down_by_its_clock(tmp_path: Path) -> None:
    found = model(clocked(tmp_path, BUSY))  # all of a step of 10 ms is a matrix product
    assert not found.fitted
    assert found.at(1.0).step_ns == pytest.approx(10 * MS)
    then = found.at(0.8)
    assert then.limit_w == pytest.approx(560)
    assert then.step_ns == pytest.approx(10 * MS / 0.8 ** (1 / 2.2), rel=1e-3)
    assert then.least_ns == pytest.approx(10 * MS / 0.8 ** (1 / K_RANGE[1]), rel=1e-3)
    assert then.most_ns == pytest.approx(10 * MS / 0.8 ** (1 / K_RANGE[0]), rel=1e-3)
    assert then.joules == pytest.approx(560 * then.step_ns / 1e9)


def test_a_limit_that_is_not_reached_costs_nothing(tmp_path: Path) -> None:
    found = model(clocked(tmp_path, BUSY | {"power_w": 500.0}))
    assert found.at(0.8).most_ns == pytest.approx(10 * MS)
    assert found.at(0.8).power_w == pytest.approx(500)
    assert found.at(0.7).step_ns > 10 * MS


@pytest.mark.parametrize("k", [1.6, 2.5])
def test_clocks_that_varied_show_how_power_grows_with_them(tmp_path: Path, k: float) -> None:
    found = model(clocked(tmp_path, *cooling(k)))
    assert found.fitted
    least, likely, most = found.k
    assert likely == pytest.approx(k, abs=0.01)
    assert least < k < most


def test_at_the_limit_the_clock_follows_the_load_and_shows_nothing(tmp_path: Path) -> None:
    read = [BUSY | {"sm_clock_mhz": mhz} for mhz in (1_800, 1_700, 1_600, 1_500)]
    assert not model(clocked(tmp_path, *read)).fitted


@pytest.mark.parametrize(
    ("read", "why"),
    [({"sm_clock_mhz": 1_800}, "were not read"), ({"power_w": 600.0, "power_limit_w": 0.0}, "were not read")],
)
def test_without_power_or_its_limit_nothing_is_predicted(tmp_path: Path, read: dict[str, float], why: str) -> None:
    path = clocked(tmp_path, read)
    with pytest.raises(NotMeasured, match=why):
        runs.measured(path, power_limits).frame(power_limits)


def test_without_a_trace_nothing_is_predicted(tmp_path: Path) -> None:
    path = clocked(tmp_path, BUSY)
    (path / "ranks/00000/trace.json.gz").unlink()
    with pytest.raises(NotMeasured):
        model(path)


def test_a_cpu_has_no_power_limit(tmp_path: Path) -> None:
    path = clocked(tmp_path, BUSY, facts=runs.CPU)
    with pytest.raises((DoesNotApply, NotMeasured)):
        model(path)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_simulated_job_with_a_lower_limit_lies_between_the_bounds(tmp_path: Path, seed: int) -> None:
    """Their power is of what leaks and of what switches at a voltage: no power of the clock fits it all along."""
    job: Any = base(seed, ranks=2 if seed == 1 else 1, low=60e6, high=120e6)
    folder.write(tmp_path / "run", job, Recording(steps=80, form="torch-2.8", device_step=True))
    found = model(tmp_path / "run")
    for share in (0.8, 0.7, 0.6):
        clock = clock_at(DEVICES[job.device], share)
        truth = true(replace(job, clocks=tuple((rank, clock) for rank in range(job.ranks)))).period_ns
        then = found.at(share)
        assert then.least_ns <= 1.01 * truth
        assert then.most_ns >= 0.99 * truth
        assert then.step_ns == pytest.approx(truth, rel=0.03)
