"""How throughput and costs are written among a report's facts."""

from __future__ import annotations

from typing import Any

import pytest

from dlprof.analysis.engine import Maybe
from dlprof.analysis.throughput.rates import described, energy, of_throughput, time_taken
from dlprof.errors import NotMeasured
from dlprof.result.figures import Cost, Throughput


def listed(throughput: Throughput) -> dict[str, str]:
    return {f.name: f.value for f in of_throughput(Maybe(lambda: throughput))}


def test_of_a_job_on_gpus() -> None:
    of_epoch = {"epoch_samples": 72_000, "epoch_s": 360.0}
    t = Throughput(200.0, 40_000.0, 20.0, "loader", 4000.0, gpus=4, power_w=1200.0, **of_epoch)  # type: ignore[arg-type]
    assert listed(t) == {
        "samples a second": "200",
        "samples a step": "20",
        "tokens a second": "40,000",
        "tokens a step": "4,000",
        "counted by": "the loaders' batches",
        "samples a second and GPU": "50",
        "tokens a second and GPU": "10,000",
        "energy of a sample": "6 J",
        "energy of a token": "0.03 J",
        "an epoch (72,000 samples)": "6 min, 0.40 GPU-hours, 0.12 kWh",
        "a million samples": "83.3 min, 5.56 GPU-hours, 1.67 kWh",
        "a billion tokens": "6.94 h, 27.8 GPU-hours, 8.33 kWh",
    }


def test_of_a_rank_nothing_is_said_of_the_job() -> None:
    t = Throughput(80.0, None, 8.0, "model", of="rank", why="who knows", epoch_samples=100, epoch_s=5.0)
    assert listed(t) == {
        "samples a second of a rank": "80",
        "samples a step of a rank": "8",
        "of the job": "not known: who knows",
        "counted by": "the first dimension of the model's input",
    }


def test_why_it_is_not_known() -> None:
    def unknown() -> Any:
        raise NotMeasured("nobody counted")

    (fact,) = of_throughput(Maybe(unknown))
    assert (fact.section, fact.name, fact.value) == ("Throughput", "not known", "nobody counted")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.05, "50.0 ms"), (119, "119.0 s"), (120, "2 min"), (5_400, "1.50 h"), (3 * 86_400, "3 days")],
)
def test_a_time_of_any_length(seconds: float, text: str) -> None:
    assert time_taken(seconds) == text


def test_energy_and_the_parts_of_a_cost() -> None:
    assert (energy(900.0), energy(7.2e6)) == ("900 J", "2 kWh")
    assert described(Cost(30.0)) == "30.0 s"
    assert described(None) == ""
