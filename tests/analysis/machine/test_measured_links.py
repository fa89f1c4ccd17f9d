"""Which measurements fit a job, where they are found, and what a collective takes by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.engine import Measured
from dlprof.analysis.machine.measured_links import expected, measured_links, unreadable
from dlprof.errors import NotMeasured
from tests.fixtures import runs
from tests.fixtures.bandwidths import measured, save
from tests.fixtures.exchanges import grouped
from tests.fixtures.runs import MS

HOSTS = {0: "node-1", 1: "node-2"}
HERE = ("node-1", "node-2")


def job(folder: Path, **facts: Any) -> Measured:
    made = grouped([(0, 1)], [10 * MS], hosts=HOSTS, device="Something else")
    known = {"backend": "nccl", "device": {"type": "cuda", "name": "Something else"}}
    ranks: list[Any] = [(m, [], {**known, "host": HOSTS[r], **facts}) for r, m in enumerate(made)]
    return runs.measured(runs.recorded(folder, *ranks), measured_links)


@pytest.mark.parametrize("where", ["runs/a", "runs"])
def test_a_measurement_in_the_runs_folder_or_beside_it_is_found(tmp_path: Path, where: str) -> None:
    save(tmp_path / where, measured(HERE, 10e9))
    frame = job(tmp_path / "runs/a").frame(measured_links)
    assert set(frame["collective"]) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert set(frame[["ranks", "hosts"]].itertuples(index=False, name=None)) == {(2, 2)}
    assert frame["source"][0] == "bandwidth-nccl-2-ranks-2-hosts.json of 2026-02-02, 2 ranks on node-1 and 1 other"


def test_around_foreign_traces_nothing_is_looked_for(tmp_path: Path) -> None:
    save(tmp_path, measured(HERE, 10e9))
    made = grouped([(0, 1)], [10 * MS], hosts=HOSTS, device="Something else")
    foreign = runs.measured(runs.foreign(tmp_path / "traces", *made), measured_links)
    with pytest.raises(NotMeasured, match="stands beside the run"):
        foreign.frame(measured_links)
    save(tmp_path / "traces", measured(HERE, 10e9))
    assert len(runs.measured(tmp_path / "traces", measured_links).frame(measured_links))


@pytest.mark.parametrize(
    ("changed", "facts", "says"),
    [
        ({"backend": "gloo"}, {}, "is of gloo, and the job's backend is nccl"),
        ({"device": "Another"}, {}, "is of Another, and the job's devices differ"),
        ({"backend": "gloo", "device": ""}, {"backend": "gloo", "device": {"type": "cpu"}, "host": "node-9"}, "node-9"),
    ],
)
def test_what_tells_nothing_of_the_job(
    tmp_path: Path, changed: dict[str, Any], facts: dict[str, Any], says: str
) -> None:
    save(tmp_path, measured(HERE, 10e9, **changed))
    found = job(tmp_path / "run", **facts)
    with pytest.raises(NotMeasured, match=says):
        found.frame(measured_links)


def test_a_group_of_several_backends_uses_that_of_its_devices(tmp_path: Path) -> None:
    save(tmp_path, measured(HERE, 10e9))
    assert len(job(tmp_path / "run", backend="cpu:gloo,cuda:nccl").frame(measured_links))


def test_the_same_gpus_elsewhere_do_and_the_jobs_own_hosts_come_first(tmp_path: Path) -> None:
    save(tmp_path / "run", measured(("node-7", "node-8"), 5e9, start_ns=0))
    frame = job(tmp_path / "run").frame(measured_links)
    assert "other hosts than the job's" in frame["source"][0]
    older = measured(HERE, 10e9, start_ns=0)
    (tmp_path / "bandwidth-old.json").write_bytes(save(tmp_path / "elsewhere", older).read_bytes())
    frame = runs.measured(tmp_path / "run", measured_links).frame(measured_links)
    assert expected(frame, "all_reduce", 2, 2, 1e7, "")[0] == pytest.approx(1 * MS)


def test_between_sizes_beyond_them_and_where_there_is_none(tmp_path: Path) -> None:
    save(tmp_path / "run", measured(HERE, 1e9, start_ns=20_000))
    frame = job(tmp_path / "run").frame(measured_links)

    def ns(*asked: Any) -> float:
        return expected(frame, *asked)[0]

    assert ns("all_reduce", 2, 2, 3e6, "") == pytest.approx(20_000 + 3 * MS)  # between 1 and 4 MiB
    assert ns("all_gather", 2, 2, 3e6, "float32") == pytest.approx(20_000 + 1.5 * MS)
    largest, smallest = 256 << 20, 1 << 20
    assert ns("all_reduce", 2, 2, 1.5 * largest, "") == pytest.approx(1.5 * ns("all_reduce", 2, 2, largest, ""))
    assert ns("all_reduce", 2, 2, 0.6 * smallest, "") == ns("all_reduce", 2, 2, smallest, "")
    for asked in (
        ("all_reduce", 2, 2, 3 * largest, ""),
        ("all_reduce", 2, 2, 0.4 * smallest, ""),
        ("all_reduce", 4, 2, 3e6, ""),
        ("all_reduce", 2, 1, 3e6, ""),
        ("all_reduce", 2, 2, 3e6, "bfloat16"),
        ("broadcast", 2, 2, 3e6, ""),
    ):
        assert np.isnan(ns(*asked)), asked


def test_a_broken_file_is_told_and_another_one_used(tmp_path: Path) -> None:
    (tmp_path / "bandwidth-x.json").write_text('{"format": 1, "timings": [')
    found = job(tmp_path / "run")
    with pytest.raises(NotMeasured, match=r"bandwidth-x\.json is broken"):
        found.frame(measured_links)
    save(tmp_path, measured(HERE, 10e9))
    again = runs.measured(tmp_path / "run", measured_links)
    assert len(again.frame(measured_links))
    (line,) = unreadable(again.job)
    assert line.startswith("bandwidth-x.json is broken")


def test_a_link_that_leads_out_is_not_followed(tmp_path: Path) -> None:
    outside = save(tmp_path / "outside", measured(HERE, 10e9))
    run = job(tmp_path / "inside/run")
    (tmp_path / "inside/run/bandwidth-a.json").symlink_to(outside)
    assert unreadable(run.job) == []
    with pytest.raises(NotMeasured, match="stands beside"):
        run.frame(measured_links)
