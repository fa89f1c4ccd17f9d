"""What is said to be true of a simulated job is true: parts add up, causes are those planted, a fix is nothing else."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from simulator.faults import FAULTS
from simulator.faults.fault import base, step_of, with_script
from simulator.hardware import MS
from simulator.healthy import compute_ns, healthy, is_healthy
from simulator.job import Job, Pauses
from simulator.play import Truth, cycle, true

STEPS = 25
SMALL = base(3)


def of(job: Job) -> Truth:
    return true(job, steps=STEPS)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    job = replace(SMALL, ranks=2, sleeps=((1, round(1.3 * step_of(SMALL))),))
    for rank in of(job).ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.step_ns, abs=1)
        assert sum(rank.idle.values()) == pytest.approx(rank.parts["idle"], abs=1)


def test_a_tuned_job_takes_what_its_kernels_take() -> None:
    told = of(SMALL)
    assert told.ranks[0].parts["computation"] == pytest.approx(compute_ns(SMALL.model, SMALL.device), rel=0.15)
    assert told.ranks[0].parts["computation"] > 0.95 * told.period_ns
    assert told.ranks[0].lag_ns > 0.5 * told.period_ns


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"after": 2 * round(step_of(SMALL))}, "host:python"),
        ({"waits_on_host": 20 * MS}, "queued_wait"),
        ({"waits_on_stream": 20 * MS}, "queued_wait"),
        ({"captured": "model", "graph_waits": 20 * MS}, "queued_wait"),
    ],
)
def test_idle_time_has_the_cause_that_was_planted(changed: dict[str, int], cause: str) -> None:
    rank = of(with_script(SMALL, **changed)).ranks[0]
    assert max(rank.idle, key=lambda what: rank.idle[what]) == cause
    assert rank.idle[cause] > 0.9 * rank.parts["idle"]


def test_the_last_rank_is_the_one_that_sleeps() -> None:
    told = of(replace(SMALL, ranks=4, sleeps=((2, round(1.4 * step_of(SMALL))),)))
    assert max(told.last, key=lambda rank: told.last[rank]) == 2
    waits = {rank.rank: rank.wait_ns for rank in told.ranks}
    assert waits[2] < 0.05 * min(waits[r] for r in (0, 1, 3))
    assert all(r.parts["communication"] > 0.2 * r.step_ns for r in told.ranks if r.rank != 2)


def test_the_same_job_has_the_same_draws_and_other_seeds_others() -> None:
    assert of(SMALL).period_ns == of(replace(SMALL, name="again")).period_ns
    assert of(SMALL).period_ns != of(replace(SMALL, seed=SMALL.seed + 1)).period_ns


def test_what_comes_now_and_then_is_seen_as_often_as_it_comes() -> None:
    """A checkpoint every ten steps costs a tenth of itself and of waiting for the device, whichever steps are seen."""
    ten = replace(SMALL, pauses=Pauses(checkpoint=200 * MS, checkpoint_every=10))
    assert cycle(ten) == 10
    more = of(ten).period_ns - of(SMALL).period_ns
    assert more == pytest.approx(20 * MS, rel=0.03)


# -- the catalogue


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fix_changes_the_job_and_neither_its_seed_nor_its_device(fault: object) -> None:
    [fault] = [f for f in FAULTS if f is fault]
    job = fault.make(1)
    fixed = fault.advised(job, 2.0) if fault.advised else fault.fix(job)
    changed = {f.name for f in fields(Job) if getattr(job, f.name) != getattr(fixed, f.name)}
    assert changed
    assert not changed & {"seed", "device", "host", "name"}


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_healthy_jobs_compute(seed: int) -> None:
    job, _, told = healthy(seed)
    assert is_healthy(job, told)
    assert all(rank.parts["computation"] >= 0.95 * told.period_ns for rank in told.ranks)
    assert job.model.products in ("bfloat16", "float16")
    assert job.model.attention == "fused"
    assert job.model.vocabulary % 8 == job.model.hidden % 8 == 0
