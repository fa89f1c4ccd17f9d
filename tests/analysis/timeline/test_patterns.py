"""Long steps at a fixed interval: found with their interval and cost, also in noise; chance and training are none."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import Measured
from dlprof.analysis.step.breakdown import breakdown, part, part_noise
from dlprof.analysis.step.savings import spread
from dlprof.analysis.timeline.patterns import periodic
from dlprof.analysis.timeline.steps import step_means
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS, asked, light


def recorded(folder: Path, step: Callable[[int], dict[str, Any]], n: int = 203, **facts: Any) -> Measured:
    """Measure a rank of n steps, of which the first three warm up."""
    path = runs.recorded(folder, (None, [step(i) for i in range(n)], {**runs.CPU, **facts}))
    return runs.measured(path, periodic, breakdown, step_means, spread)


def rolls_out(n: int, **said: Any) -> dict[str, Any]:
    """Return a step of 10 ms, and of 90 ms every 16th time, 20 ms of those in forward passes."""
    if n % 16:
        return light(n, 10 * MS, forward_ns=2 * MS, forwards=1, **said)
    return light(n, 90 * MS, forward_ns=22 * MS, forwards=129, **said)


def test_every_16th_step_is_found_with_what_it_costs_and_where(tmp_path: Path) -> None:
    made = recorded(tmp_path, rolls_out)
    (row,) = made.frame(periodic).to_dict("records")
    assert (row["every"], row["steps"], row["phase"], row["forwards"]) == (16, 12, "rest", 128)
    assert row["extra_ns"] == pytest.approx(80 * MS)
    assert row["cost_ns"] == pytest.approx(80 * MS * 12 / 200)
    assert row["noise_ns"] == 0
    assert asked(made, part, "periodic_work") == {0: pytest.approx(80 * MS * 12 / 200)}
    assert asked(made, part, "computation") == {0: pytest.approx(2 * MS)}


def test_a_known_interval_is_no_noise(tmp_path: Path) -> None:
    made = recorded(tmp_path, rolls_out)
    assert made.frame(step_means)["noise_ns"].iloc[0] == pytest.approx(0, abs=1)
    assert made.frame(spread)["noise_ns"].iloc[0] == pytest.approx(0, abs=1)
    assert made.frame(step_means)["step_ns"].iloc[0] == pytest.approx(10 * MS + 80 * MS * 12 / 200)


def test_it_is_found_among_steps_that_vary_by_chance(tmp_path: Path) -> None:
    chance = random.Random(1)
    lengths = [int((10 + chance.expovariate(1 / 5) + 100 * (n % 16 == 5)) * MS) for n in range(300)]
    (row,) = recorded(tmp_path, lambda n: light(n, lengths[n]), 300).frame(periodic).to_dict("records")
    assert row["every"] == 16
    assert row["cost_ns"] == pytest.approx(100 * MS / 16, rel=0.1)


def test_two_intervals_are_told_apart(tmp_path: Path) -> None:
    made = recorded(tmp_path, lambda n: light(n, (10 + 5 * (n % 10 == 0) + 200 * (n % 50 == 7)) * MS), 403)
    assert [(row["every"], round(row["extra_ns"] / MS, -1)) for row in made.frame(periodic).to_dict("records")] == [
        (50, 200),
        (10, 0),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_long_steps_by_chance_have_no_interval(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    lengths = [int((10 + (80 if chance.random() < 0.06 else chance.random())) * MS) for _ in range(300)]
    assert recorded(tmp_path, lambda n: light(n, lengths[n]), 300).frame(periodic).empty


def test_what_a_loader_or_a_stall_takes_is_not_counted(tmp_path: Path) -> None:
    made = recorded(tmp_path / "a", lambda n: light(n, (10 + 50 * (n % 8 == 0)) * MS, fetch_ns=50 * MS * (n % 8 == 0)))
    assert made.frame(periodic).empty
    steps = [light(n, (10 + 50 * (n % 8 == 0)) * MS) for n in range(203)]
    stalls = [[runs.stall("checkpoint", n, 50 * MS) for n in range(0, 203, 8)]]
    path = runs.recorded(tmp_path / "b", (None, steps, runs.CPU), stalls=stalls)
    assert runs.measured(path, periodic).frame(periodic).empty


def test_another_networks_turn_is_training_and_no_noise(tmp_path: Path) -> None:
    def step(n: int) -> dict[str, Any]:
        turn = n % 5 == 0
        return light(n, (10 + 20 * turn) * MS, backward_ns=(5 + 20 * turn) * MS, backwards=1 + turn)

    made = recorded(tmp_path, step)
    assert made.frame(periodic).empty
    assert made.frame(step_means)["noise_ns"].iloc[0] == pytest.approx(0, abs=1)
    assert asked(made, part, "periodic_work") == {0: 0.0}


def test_traced_steps_with_it_are_left_out_and_others_are_no_noise(tmp_path: Path) -> None:
    steps = [rolls_out(n, profiled=int(30 <= n < 35)) for n in range(203)]
    events: list[Any] = []
    at = 0
    for n in range(30, 35):
        length = (10 if n % 16 else 90) * MS
        events += [traces.step(n, at, length), traces.annotation("dlprof::forward", at, 2 * MS)]
        events.append(traces.op("aten::mm", at, 2 * MS))
        at += length
    made = traces.trace(*events, device="")
    run = runs.measured(runs.recorded(tmp_path, (made, steps, runs.CPU)), breakdown, step_means)
    (means,) = run.frame(step_means).to_dict("records")
    assert (means["traced_steps"], means["overhead"]) == (4, pytest.approx(1.0))
    cost = asked(run, part, "periodic_work")[0]
    assert cost == pytest.approx(80 * MS * 11 / 195)
    assert asked(run, part, "computation")[0] == pytest.approx(2 * MS)
    assert asked(run, part_noise, "host") == pytest.approx(0, abs=1)


def test_a_device_without_its_clock_abstains(tmp_path: Path) -> None:
    made = recorded(tmp_path, rolls_out, device={"type": "cuda", "name": "A100"})
    with pytest.raises(NotMeasured, match="clock"):
        made.frame(periodic)
