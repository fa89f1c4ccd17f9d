"""The facts of a run, by section: what it is, where ranks differ, what was overridden, and what was sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import Measured
from dlprof.analysis.figures import SECTIONS, override_effects, run_info
from dlprof.analysis.figures import facts as facts_of
from dlprof.analysis.panel import drawn
from dlprof.analysis.panels.machine import SAMPLES_PICTURE
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import allocator, readings
from tests.fixtures.readings import sampled
from tests.fixtures.runs import CPU, MS, light, measured, recorded

STEPS = [light(n, 100 * MS) for n in range(9)]
SOFTWARE = {"torch": "2.13.0", "python": "3.11.7"}
FACTS = {**CPU, "versions": SOFTWARE, "loaders": [{"num_workers": 2}], "env": {"OMP_NUM_THREADS": "2"}}


def known(run: Measured, section: str) -> dict[str, str]:
    return {fact.name: fact.value for fact in facts_of(run) if fact.section == section}


def test_a_run_is_named_and_a_fact_in_which_ranks_differ_shows_all_its_values(tmp_path: Path) -> None:
    other = FACTS | {"versions": SOFTWARE | {"torch": "2.12.0"}}
    run = measured(recorded(tmp_path / "run", (None, STEPS, FACTS), (None, STEPS, other)), *SECTIONS)
    software = known(run, "Software")
    assert (software["torch"], software["python"], "cuda" in software) == ("2.13.0, 2.12.0", "3.11.7", False)
    assert (known(run, "Job")["ranks"], known(run, "Device")["type"]) == ("2 of 2", "cpu")
    assert known(run, "Environment") == {"OMP_NUM_THREADS": "2"}
    assert all(fact.value for fact in facts_of(run))
    info = run_info(run.job, ["a warning"])
    assert (info.path, info.ranks, info.missing_ranks, info.world_size) == ("run", (0, 1), (), 2)
    assert (info.device, info.torch, info.warnings) == ("CPU", "2.13.0", ("a warning",))
    # Lists are written as people write them.
    facts = FACTS | {"device": {"capability": [9, 0]}, "cpu": {"units": ["avx2", "fma"]}}
    device = known(measured(recorded(tmp_path / "gpu", (None, STEPS, facts)), *SECTIONS), "Device")
    assert (device["capability"], device["cpu units"]) == ("9.0", "avx2, fma")
    # Of memory the most of any rank.
    gb = allocator.GB
    run = measured(
        allocator.recorded(tmp_path / "memory", *([allocator.reading(0, n * gb)] for n in (3, 8))), *SECTIONS
    )
    memory = known(run, "Memory")
    assert (memory["most allocated"], memory["allocations that failed"]) == ("8.50 GB of 100 GB (8.5 %)", "0")
    # One that left next to nothing has facts all the same.
    bare = measured(recorded(tmp_path / "bare", (None, [], {})), *SECTIONS)
    assert known(bare, "Job")
    assert run_info(bare.job, []).device == ""


@pytest.mark.parametrize(("alone", "told"), [((True, True), True), ((True, False), False), ((True,), False)])
def test_processes_that_train_apart_are_said_to_be_ranks_in_name_only(
    tmp_path: Path, alone: tuple[bool, ...], told: bool
) -> None:
    path = recorded(tmp_path, *((None, STEPS, {**CPU, "alone": one, "world_size": 1}) for one in alone))
    run = measured(path, *SECTIONS)
    assert run.job.apart is told
    assert ("process group" in known(run, "Job")) is told


ENTRY = {"value": 4, "applied": 1, "before": [0], "places": [["train.py", 12, "main"]], "error": None}
OTHER = ENTRY | {"places": [["train.py", 12, "main"], ["eval.py", 3, "f"]], "applied": 2, "before": [1]}
FAILED = {"value": True, "applied": 0, "before": [], "places": [], "error": "too sparse"}


@pytest.mark.parametrize(
    ("ranks", "facts"),
    [
        ([{"loader.num_workers": ENTRY}], {"loader.num_workers": "0 → 4 at train.py:12, 1 time"}),
        ([{"loader.num_workers": ENTRY, "optimizer.fused": FAILED}, {"loader.num_workers": OTHER}],
         {"loader.num_workers": "0, 1 → 4 at train.py:12, eval.py:3, 3 times",
          "optimizer.fused": "True never applied: too sparse"}),
        ([{}], {}),
        ([None], {}),
    ],
)  # fmt: skip
def test_overrides_say_before_value_place_and_how_often(
    tmp_path: Path, ranks: list[dict[str, Any] | None], facts: dict[str, str]
) -> None:
    made = recorded(tmp_path / "run", *((None, STEPS, CPU) for _ in ranks))
    for n, entries in enumerate(ranks):
        if entries is not None:
            (made / f"ranks/{n:05d}/overrides.json").write_text(json.dumps(entries))
    run = measured(made, override_effects, *SECTIONS)
    assert known(run, "Overrides") == facts
    if not facts:
        with pytest.raises(NotMeasured):
            run.frame(override_effects)


def test_a_line_a_rank_and_host_of_what_was_sampled_and_the_facts(tmp_path: Path) -> None:
    rows = [{"cpu_s": 0.5 * n, "rss_bytes": 3e8, "children": 2, "children_cpu_s": 0.25 * n} for n in range(40)]
    folder = sampled(tmp_path / "a", rows, rows)
    host = {"core_percent": [100, 50, 0, 0], "memory_used_bytes": 4e9}
    readings.write(folder / "hosts/node-1/host.jsonl", [host] * 40)
    run = measured(folder, SAMPLES_PICTURE.draw, *SECTIONS)
    cores, memory = (p for p in drawn(run, [SAMPLES_PICTURE]) if p.title in ("Cores in use", "Memory in use"))
    assert cores.columns == ("time_ns", "rank 0", "rank 1", "loader workers and other children", "all of node-1")
    # The children of both ranks together; every line has a point in every row.
    assert len(cores.rows) > 10
    assert all(row[1:] == pytest.approx((0.5, 0.5, 0.5, 1.5)) for row in cores.rows[1:])
    assert memory.columns == ("time_ns", "rank 0", "rank 1", "all of node-1")
    facts = known(run, "Host")
    assert facts["cores in use"] == "1.50 of 4"
    assert facts["cores in use by a rank's process"] == "0.50, 0.50"
    assert facts["cores in use by its children"] == "0.25, 0.25"
    assert not known(run, "GPU")
    # Many ranks are a mean and a largest.
    folder = sampled(tmp_path / "b", *([{"cpu_s": (1 + rank) * n} for n in range(10)] for rank in range(9)))
    panels = drawn(measured(folder, SAMPLES_PICTURE.draw), [SAMPLES_PICTURE])
    (cores,) = (p for p in panels if p.title == "Cores in use")
    assert cores.columns == ("time_ns", "mean of ranks", "largest of ranks")
    assert cores.rows[1][1:] == pytest.approx((5, 9))


def test_energy_is_told_where_a_gpu_told_it(tmp_path: Path) -> None:
    rows = [{"energy_j": 600 * n, "power_w": 590, "sm_busy_share": 0.5} for n in range(40)]
    folder = sampled(tmp_path, rows, name="gpu.jsonl")
    run = measured(folder, SAMPLES_PICTURE.draw, *SECTIONS)
    assert known(run, "GPU") == {"multiprocessors at work": "50 %", "power": "600 W", "energy of a step": "540 J"}
    titles = [p.title for p in drawn(run, [SAMPLES_PICTURE])]
    assert ("GPU: power" in titles, "GPU: some kernel ran" in titles) == (True, False)
    assert open_run(folder).warnings == ()
