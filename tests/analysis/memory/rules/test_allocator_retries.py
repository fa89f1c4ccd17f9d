"""Retries of the allocator: found with what the steps around them take longer; without, or cheap, left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory.rules.allocator_retries import RULE
from dlprof.result import Setting
from tests.fixtures import runs
from tests.fixtures.allocator import GB, GPU, reading, write
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS, light


def recorded(
    folder: Path, retried: Sequence[int], *, longer: int = 10, every: int = 2, facts: dict[str, Any] = GPU, **said: Any
) -> Path:
    """Record 60 steps of 20 ms, a reading each `every` of them; those in `retried` last longer, by so many ms."""
    steps = [light(n, (20 + longer * (n in retried) + n % 2) * MS) for n in range(60)]
    path = runs.recorded(folder, (None, steps, facts))
    rows = [reading(n, 40 * GB, retries=sum(r <= n for r in retried), **said) for n in range(every - 1, 60, every)]
    write(path, rows)
    return path


def test_what_steps_around_retries_take_longer_is_the_saving(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, range(10, 60, 4)))
    assert found.state == "found"
    # 13 of the steps that are steady (from the fourth on) last 10 ms longer.
    assert found.saving_ns == pytest.approx(13 * 10 * MS / 57, rel=0.02)
    assert found.share == pytest.approx(found.saving_ns / ((20.5 + 130 / 57) * MS), rel=0.01)
    assert (found.ranks, [cost.ns for cost in found.by_rank]) == ((0,), [found.saving_ns])
    assert "On rank 0 13 allocations succeeded only after the cache was emptied, with 42 GB of 100 GB" in found.summary
    assert found.changes[0].settings == (Setting("PYTORCH_CUDA_ALLOC_CONF", None, "expandable_segments:True"),)
    assert [c.numerics for c in found.changes] == [False, True, False, False]
    assert found.evidence is not None
    assert found.evidence.columns[-1] == "longer, a mean step_ns"
    assert found.evidence.rows == ((0, 13, 0, 26, 31, found.saving_ns),)


def test_the_variable_goes_by_the_name_of_the_jobs_torch(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, range(10, 60, 4), facts=GPU | {"versions": {"torch": "2.9.0+cu128"}}))
    assert found.changes[0].settings == (Setting("PYTORCH_ALLOC_CONF", None, "expandable_segments:True"),)


def test_a_setting_that_is_there_is_not_advised(tmp_path: Path) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    loaders = [{"role": "train", "batch_size": 32}]
    found = ask(RULE, recorded(tmp_path, range(10, 60, 4), facts=GPU | {"env": env, "loaders": loaders}))
    assert found.advice[0] == "a smaller batch (is 32)"
    assert not any(change.settings for change in found.changes)


def test_retries_that_cost_nothing_and_none_at_all_are_left_alone(tmp_path: Path) -> None:
    cheap = ask(RULE, recorded(tmp_path / "cheap", [20, 40], longer=0))
    assert (cheap.state, cheap.share, "2 allocations" in cheap.summary) == ("clear", 0, True)
    none = ask(RULE, recorded(tmp_path / "none", []))
    assert (none.state, none.share, none.summary) == ("clear", 0, "no allocation had to be tried again")


def test_retries_while_starting_up_do_not_count(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, [0])).summary == "no allocation had to be tried again"


def test_where_every_step_retries_the_cost_is_not_known(tmp_path: Path) -> None:
    answer = ask(RULE, recorded(tmp_path, range(60)))
    assert (answer.state, "58 allocations had to be tried again" in answer.why) == ("not_measured", True)


def test_without_cuda_or_what_its_allocator_counts_it_abstains(tmp_path: Path) -> None:
    assert "on the CPU" in ask(RULE, recorded(tmp_path / "cpu", [20], facts=dict(runs.CPU))).why
    path = recorded(tmp_path / "old", [20])
    rows = [reading(n, GB) | {"retries": None} for n in range(60)]
    write(path, rows)
    assert "does not count" in ask(RULE, path).why
