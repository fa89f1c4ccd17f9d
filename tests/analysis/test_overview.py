"""The facts of a run: what it is, by section, and where ranks differ all of their values."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis import overview
from dlprof.analysis.engine import Measured
from tests.fixtures import runs
from tests.fixtures.runs import CPU, MS, light

STEPS = [light(n, 100 * MS) for n in range(9)]
FACTS = {
    **CPU,
    "versions": {"torch": "2.13.0", "python": "3.11.7"},
    "loaders": [{"num_workers": 2, "batch_size": 64}],
    "environment": {"OMP_NUM_THREADS": "2"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Return a run of two ranks with other versions of torch."""
    other = FACTS | {"versions": {"torch": "2.12.0", "python": "3.11.7"}}
    folder = runs.recorded(tmp_path_factory.mktemp("run") / "run", (None, STEPS, FACTS), (None, STEPS, other))
    return runs.measured(folder, *overview.SECTIONS)


def test_a_fact_in_which_ranks_differ_shows_all_its_values(run: Measured) -> None:
    known = {(fact.section, fact.name): fact.value for fact in overview.facts(run)}
    assert known["Software", "torch"] == "2.13.0, 2.12.0"
    assert known["Software", "python"] == "3.11.7"
    assert known["Job", "ranks"] == "2 of 2"
    assert known["Device", "type"] == "cpu"


def test_what_is_not_known_is_no_fact(run: Measured) -> None:
    facts = overview.facts(run)
    assert facts
    assert all(fact.value for fact in facts)
    assert ("Software", "cuda") not in {(fact.section, fact.name) for fact in facts}


def test_a_run_is_named_with_its_ranks_device_and_version(run: Measured) -> None:
    info = overview.run_info(run.job, ["a warning"])
    assert (info.path, info.ranks, info.missing_ranks, info.world_size) == ("run", (0, 1), (), 2)
    assert (info.device, info.torch, info.warnings) == ("CPU", "2.13.0", ("a warning",))


def test_a_run_that_left_next_to_nothing_has_facts_all_the_same(tmp_path: Path) -> None:
    bare = runs.measured(runs.recorded(tmp_path / "run", (None, [], {})), *overview.SECTIONS)
    assert {fact.section for fact in overview.facts(bare)} >= {"Job"}
    assert overview.run_info(bare.job, []).device == ""


@pytest.mark.parametrize(("alone", "told"), [((True, True), True), ((True, False), False), ((True,), False)])
def test_processes_that_train_apart_are_said_to_be_ranks_in_name_only(
    tmp_path: Path, alone: tuple[bool, ...], told: bool
) -> None:
    steps = [runs.light(n, runs.MS) for n in range(9)]
    path = runs.recorded(tmp_path, *((None, steps, {**runs.CPU, "alone": one, "world_size": 1}) for one in alone))
    job = runs.measured(path).job
    assert job.apart is told
    names = [fact.name for fact in overview._of_job(job)]
    assert ("process group" in names) is told
