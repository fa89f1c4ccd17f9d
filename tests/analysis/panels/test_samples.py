"""A line a rank, host and GPU of what was sampled, and the facts beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis import overview
from dlprof.analysis.panel import drawn
from dlprof.analysis.panels.machine import SAMPLES_PICTURE
from dlprof.read.run import open_run
from tests.fixtures import readings, runs
from tests.fixtures.readings import sampled


def test_the_report_draws_a_line_a_rank_and_host_and_lists_what_was_measured(tmp_path: Path) -> None:
    rows = [{"cpu_s": 0.5 * n, "rss_bytes": 3e8, "children": 2, "children_cpu_s": 0.25 * n} for n in range(40)]
    folder = sampled(tmp_path, rows, rows)
    host = {"core_percent": [100, 50, 0, 0], "memory_used_bytes": 4e9}
    readings.write(folder / "hosts/node-1/host.jsonl", [host] * 40)
    run = runs.measured(folder, SAMPLES_PICTURE.draw, *overview.SECTIONS)
    cores, memory = (p for p in drawn(run, [SAMPLES_PICTURE]) if p.title in ("Cores in use", "Memory in use"))
    assert cores.columns == ("time_ns", "rank 0", "rank 1", "loader workers and other children", "all of node-1")
    # The children of both ranks together; every line has a point in every row.
    assert len(cores.rows) > 10
    assert all(row[1:] == pytest.approx((0.5, 0.5, 0.5, 1.5)) for row in cores.rows[1:])
    assert memory.columns == ("time_ns", "rank 0", "rank 1", "all of node-1")
    facts = {f.name: f.value for f in overview.facts(run) if f.section == "Host"}
    assert facts["cores in use"] == "1.50 of 4"
    assert facts["cores in use by a rank's process"] == "0.50, 0.50"
    assert facts["cores in use by its children"] == "0.25, 0.25"
    assert not any(f.section == "GPU" for f in overview.facts(run))


def test_energy_is_told_where_a_gpu_told_it(tmp_path: Path) -> None:
    rows = [{"energy_j": 600 * n, "power_w": 590, "sm_busy_share": 0.5} for n in range(40)]
    folder = sampled(tmp_path, rows, name="gpu.jsonl")
    run = runs.measured(folder, SAMPLES_PICTURE.draw, *overview.SECTIONS)
    facts = {f.name: f.value for f in overview.facts(run) if f.section == "GPU"}
    assert facts == {"multiprocessors at work": "50 %", "power": "600 W", "energy of a step": "540 J"}
    titles = [p.title for p in drawn(run, [SAMPLES_PICTURE])]
    assert "GPU: power" in titles
    assert "GPU: some kernel ran" not in titles
    assert open_run(folder).warnings == ()


def test_many_ranks_are_a_mean_and_a_largest(tmp_path: Path) -> None:
    folder = sampled(tmp_path, *([{"cpu_s": (1 + rank) * n} for n in range(10)] for rank in range(9)))
    run = runs.measured(folder, SAMPLES_PICTURE.draw, *overview.SECTIONS)
    (cores,) = (p for p in drawn(run, [SAMPLES_PICTURE]) if p.title == "Cores in use")
    assert cores.columns == ("time_ns", "mean of ranks", "largest of ranks")
    assert cores.rows[1][1:] == pytest.approx((5, 9))
