"""The simulated allocator keeps to PyTorch's rules, and what is predicted of memory is what the changed job takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import memory as benchmark
from dlprof.analysis.memory.memory import memory_composition
from dlprof.analysis.memory.rules import out_of_memory
from simulator import folder, healthy, memory
from simulator.job import Job, Memory, Recording
from simulator.memory import Allocator, OutOfMemoryError
from tests.fixtures.asking import ask
from tests.fixtures.runs import measured

MB = 1 << 20
AMPLE = 10**12


def test_requests_are_cut_from_the_segments_that_pytorch_takes() -> None:
    a = Allocator(100 * MB)
    first = a.take(100, "x")
    assert (a.allocated, a.reserved) == (512, 2 * MB)
    second = a.take(3 * MB, "x")  # below 10 MiB: of a segment of 20
    assert (a.reserved, second.size) == (22 * MB, 3 * MB)
    a.take(11 * MB + 5, "x")  # the rest of these 20 serves it; what is left is split off
    assert (a.reserved, a.allocated) == (22 * MB, 512 + 14 * MB + 512)
    whole = a.take(11 * MB, "x")  # of its own: a multiple of 2 MiB, of which so little is left that it is not split
    assert (a.reserved, whole.size) == (34 * MB, 12 * MB)
    a.give(second)
    a.give(first)
    assert (a.reserved, a.peak_allocated) == (34 * MB, 26 * MB + 1024)


def test_the_cache_is_emptied_before_a_request_fails() -> None:
    a = Allocator(40 * MB)
    a.give(a.take(30 * MB, "x"))
    a.take(32 * MB, "x")
    assert (a.retries, a.reserved, a.device_frees) == (1, 32 * MB, 1)
    with pytest.raises(OutOfMemoryError) as failed:
        a.take(20 * MB, "activation")
    assert (failed.value.size, failed.value.part) == (20 * MB, "activation")


def job_of(seed: int, products: str = "bfloat16", **of: object) -> Job:
    """Return a random job on a device that holds whatever it asks for."""
    model = replace(healthy.draw_model(np.random.default_rng(seed), "A100"), products=products)
    return Job(model=model, memory=replace(Memory(total=AMPLE), **of))  # type: ignore[arg-type]


def true_bytes(job: Job) -> int:
    """Return what the job takes of its GPU at the peak: what its allocator reserves, and its context."""
    ran = memory.simulated(job)
    return ran.allocator.peak_reserved + ran.of.context


@pytest.mark.parametrize("seed", [0, 3])
def test_every_part_is_what_the_simulated_allocator_gave(tmp_path: Path, seed: int) -> None:
    job = job_of(seed)
    folder.write(tmp_path / "run", job, Recording(steps=60, skip=5, active=3))
    parts = measured(tmp_path / "run", memory_composition).frame(memory_composition).set_index("part")["bytes"]
    ran = memory.simulated(job)
    a = ran.allocator
    assert parts.sum() == pytest.approx(true_bytes(job))
    assert parts["cache"] == a.peak_reserved - a.peak_allocated
    assert parts["libraries"] == ran.of.context
    for part in ("parameter", "optimizer", "activation", "cast"):
        # Blocks are up to 1 MiB larger than what lies in them.
        assert parts[part] == pytest.approx(a.at_peak[part], rel=0.1), part
    assert parts["temporary"] == pytest.approx(a.at_peak["temporary"], rel=0.05)


@pytest.mark.slow
def test_the_changed_jobs_take_what_was_predicted(tmp_path: Path) -> None:
    every = [one for seed in range(8) for one in benchmark.simulated(seed, tmp_path / str(seed))]
    assert {one.change for one in every} == set(benchmark.CHANGES)
    allocated = [abs(one.allocated - 1) for one in every]
    assert np.median(allocated) <= 0.01
    assert max(allocated) <= 0.1
    assert np.median([abs(one.reserved - 1) for one in every]) <= 0.05
    assert all(one.low <= 1.005 and one.high >= 0.995 for one in every)


@pytest.mark.parametrize("full", [0.9, pytest.param(0.97, marks=pytest.mark.long)])
def test_a_job_that_ran_out_fits_with_the_change_that_is_named(tmp_path: Path, full: float) -> None:
    job = job_of(0)
    ran = memory.simulated(job)
    # The device has less than the job needs: it dies in a longer batch than the one that was counted.
    folder.write(tmp_path / "run", job, Recording(steps=60, skip=5, active=3))
    total = round(full * (ran.allocator.peak_allocated + ran.of.context))
    small = replace(job, memory=Memory(total=total))
    with pytest.raises(OutOfMemoryError) as failed:
        memory.simulated(small)
    rank = tmp_path / "run/ranks/00000"
    facts = json.loads((rank / "facts.json").read_text())
    held = total - ran.of.context - failed.value.size // 2
    text = (
        f"CUDA out of memory. Tried to allocate {failed.value.size / MB:.2f} MiB. GPU 0 has a total capacity of"
        f" {total / MB:.2f} MiB of which 1.00 MiB is free. Of the allocated memory {held / MB:.2f} MiB is allocated by"
        " PyTorch, and 1.00 MiB is reserved by PyTorch but unallocated."
    )
    facts |= {"failure": {"type": "OutOfMemoryError", "text": text, "site": "forward (train.py:3)"}, "ended": "exit"}
    facts["device"]["memory_bytes"] = total
    (rank / "facts.json").write_text(json.dumps(facts))
    found = ask(out_of_memory.RULE, tmp_path / "run")
    assert (found.state, found.scope, found.ranks) == ("found", "failure", (0,))
    assert "forward (train.py:3) failed in step 60" in found.summary
    assert any("`torch.utils.checkpoint` around `blocks.*`" in c.text for c in found.changes)
    # Really changed, it fits on that device.
    memory.simulated(replace(job, memory=Memory(total=total, checkpoints=True)))
