"""What programs outside the job take of a host's cores, and when a run beside them clears the job of nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.machine.samples import foreign_load
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import runs
from tests.fixtures.readings import crowded
from tests.fixtures.runs import MS


def load(path: Path) -> dict[str, Any]:
    """Return the row of the host that felt it most."""
    frame = runs.measured(path, foreign_load).frame(foreign_load)
    return {str(name): value for name, value in frame.to_dict("records")[0].items()}


def test_the_job_is_told_from_what_else_runs(tmp_path: Path) -> None:
    """Two ranks of two cores each, half a core of their launcher's, and 3.5 of somebody else."""
    row = load(crowded(tmp_path, 0.3, 0.1, threads=4, others=4.0, ours=4.5))
    assert (row["host"], row["cores"]) == ("node-1", 8)
    assert [row["used"], row["ours"], row["foreign"]] == pytest.approx([8.0, 4.5, 3.5])
    # No more threads than cores: nobody else makes them wait.
    assert [row["waited"], row["lost"]] == pytest.approx([0.3, 0.3])
    assert row["disturbs"] == 1


def test_a_job_with_too_many_threads_makes_itself_wait(tmp_path: Path) -> None:
    row = load(crowded(tmp_path, 0.3, 0.3, threads=8, others=1.0, ours=4.0))
    assert row["foreign"] == pytest.approx(1.0, abs=0.05)
    assert row["lost"] == pytest.approx(0.3 / 5, abs=0.005)


def test_a_job_whose_workers_need_its_cores_makes_itself_wait(tmp_path: Path) -> None:
    path = crowded(tmp_path, 0.3, threads=4, others=6.0, ours=6.0)
    processes = path / "ranks/00000/processes.jsonl"
    lines = [json.loads(line) for line in processes.read_text().splitlines()]
    processes.write_text("".join(json.dumps(row | {"children_cpu_s": 4.0 * n}) + "\n" for n, row in enumerate(lines)))
    row = load(path)
    assert row["lost"] == pytest.approx(0.3 * 2 / 8)


@pytest.mark.parametrize(
    ("waits", "others", "ours", "disturbs"),
    [
        (0.3, 0.0, 4.0, 0),  # nobody else is there
        (0.01, 2.0, 4.0, 0),  # they have cores of their own
        (0.01, 4.0, 4.0, 1),  # no core is left
        (0.3, 0.2, 4.0, 0),  # a host's own services
        (0.2, 2.0, 4.0, 1),
    ],
)
def test_what_has_cores_of_its_own_disturbs_nobody(
    tmp_path: Path, waits: float, others: float, ours: float, disturbs: int
) -> None:
    assert load(crowded(tmp_path, waits, waits, threads=4, others=others, ours=ours))["disturbs"] == disturbs


def test_on_a_gpu_no_more_is_lost_than_it_leaves_idle(tmp_path: Path) -> None:
    path = crowded(tmp_path, 0.3, threads=4, others=2.0, ours=2.0)
    facts = path / "ranks/00000/facts.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"device": {"type": "cuda"}}))
    assert load(path)["lost"] == pytest.approx(0.3)  # without a trace nobody knows what it leaves
    idle = pd.DataFrame({"rank": [0, 0], "category": ["computation", "host"], "ns": [810.0 * MS, 90.0 * MS]})

    def traced(sample_means: pd.DataFrame, job: Job) -> pd.DataFrame:
        return foreign_load(sample_means, Maybe(lambda: idle), 900.0 * MS, job)

    row = runs.asked(runs.measured(path, foreign_load), traced).iloc[0]
    assert (row["waited"], row["lost"]) == (pytest.approx(0.1), pytest.approx(0.1))


def test_without_a_record_of_what_the_job_used_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="not sampled"):
        load(crowded(tmp_path, 0.3, 0.3, others=4.0))


def test_the_result_has_the_host_that_felt_it_most(tmp_path: Path) -> None:
    found = diagnose(open_run(crowded(tmp_path / "loud", 0.3, threads=4, others=6.0, ours=2.0)), (), jobs=1)
    assert found.foreign_load is not None
    assert found.foreign_load.disturbs
    assert found.foreign_load.foreign == pytest.approx(6.0)
    assert any("programs outside the job used 6 of 8 cores" in warning for warning in found.run.warnings)
    quiet = diagnose(open_run(crowded(tmp_path / "quiet", 0.0, threads=4, ours=2.0)), (), jobs=1)
    assert quiet.foreign_load is not None
    assert not quiet.foreign_load.disturbs
    assert not any("outside the job" in warning for warning in quiet.run.warnings)
    assert diagnose(open_run(crowded(tmp_path / "old", 0.3)), (), jobs=1).foreign_load is None
