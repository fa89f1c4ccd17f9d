"""How many threads and cores a rank has, and how long its main thread waits, on runs with samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.machine.cores import core_waits, spare_cores
from dlprof.errors import NotMeasured
from tests.fixtures import runs
from tests.fixtures.readings import crowded
from tests.fixtures.runs import MS


def waits(path: Path) -> pd.DataFrame:
    return runs.measured(path, core_waits).frame(core_waits)


def test_a_rank_waits_for_its_share_of_the_cores(tmp_path: Path) -> None:
    frame = waits(crowded(tmp_path, 0.2, 0.25))
    assert frame[["threads", "cores"]].to_numpy().tolist() == [[8, 4], [8, 4]]
    assert frame["waited"].to_list() == pytest.approx([0.2, 0.25])
    assert frame["waits_ns"].to_list() == pytest.approx([180 * MS, 225 * MS])
    assert frame["involuntary_switches_per_s"].to_list() == pytest.approx([900, 900])
    assert frame["children_cpu_cores"].isna().all()


def test_cores_that_a_rank_is_bound_to_are_its_own(tmp_path: Path) -> None:
    assert waits(crowded(tmp_path, 0.2, 0.2, affinity=3))["cores"].to_list() == [3, 3]


def test_on_a_gpu_no_more_counts_than_the_host_leaves_it_idle(tmp_path: Path) -> None:
    path = crowded(tmp_path, 0.3)
    facts = path / "ranks/00000/facts.json"
    told: dict[str, Any] = json.loads(facts.read_text()) | {"device": {"type": "cuda"}}
    # With as many threads as cores nobody needs to know it.
    facts.write_text(json.dumps(told))
    assert waits(path)["waits_ns"].to_list() == pytest.approx([270 * MS])
    facts.write_text(json.dumps(told | {"cpu": {"count": 8, "affinity": 8, "torch_threads": 64}}))
    with pytest.raises(NotMeasured):
        waits(path)


def test_a_kernel_that_does_not_count_it_abstains(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="does not count"):
        waits(crowded(tmp_path, None))


def spare(path: Path) -> pd.DataFrame:
    return runs.measured(path, spare_cores).frame(spare_cores)


def test_a_core_that_nobody_uses_is_one_for_another_thread(tmp_path: Path) -> None:
    """A rank uses two of eight cores with two threads; then two ranks, one beside others, one bound to three cores."""
    row = spare(crowded(tmp_path / "one", 0.0, threads=2)).to_dict("records")[0]
    assert (row["threads"], row["cores"], row["more"]) == (2, 8, 8)
    assert row["idle"] == pytest.approx(6.0)
    assert spare(crowded(tmp_path / "two", 0.0, 0.0, threads=2))["more"].to_list() == [4, 4]
    assert spare(crowded(tmp_path / "busy", 0.0, 0.0, threads=2, others=3.4))["more"].to_list() == [2, 2]
    assert spare(crowded(tmp_path / "bound", 0.0, 0.0, threads=2, affinity=3))["more"].to_list() == [3, 3]


def test_more_threads_than_cores_are_no_reason_for_fewer_here(tmp_path: Path) -> None:
    assert spare(crowded(tmp_path, 0.0, 0.0, threads=8))["more"].to_list() == [8, 8]


def test_without_samples_of_the_host_no_core_is_known_to_be_idle(tmp_path: Path) -> None:
    path = crowded(tmp_path, 0.0)
    (path / "hosts/node-1/host.jsonl").write_text("")
    with pytest.raises(NotMeasured, match="not sampled"):
        spare(path)
