"""Embeddings in the host's memory: what they take, what goes with them, and what a job gains without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.host.host_tables import host_tables
from dlprof.read.run import open_run
from simulator import folder, play
from simulator.faults import FAULTS
from simulator.faults.fault import recording
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS

US = 1_000
FAULT = next(f for f in FAULTS if f.name == "host_tables")


def test_lookups_gradients_and_copies_are_those_that_were_simulated(tmp_path: Path) -> None:
    job = FAULT.make(3)
    folder.write(tmp_path / "run", job, recording(job, FAULT.name))
    (row,) = RankData(open_run(tmp_path / "run").ranks[0]).once(host_tables).to_dict("records")
    tables = job.tables
    assert (row["lookups"], row["copies"]) == (tables.count, 2 * tables.count)
    assert row["copy_bytes"] == pytest.approx(2 * tables.count * tables.size)
    assert row["lookup_ns"] == pytest.approx(tables.count * tables.lookup, rel=0.2)
    assert row["gradient_ns"] == pytest.approx(tables.count * tables.gradient, rel=0.2)
    assert row["optimizer_ns"] == 0
    gain = play.true(job).period_ns - play.true(FAULT.fix(job)).period_ns
    assert row["gain_ns"] == pytest.approx(gain, rel=0.1)


def test_the_same_on_the_device_are_none(tmp_path: Path) -> None:
    job = FAULT.fix(FAULT.make(3))
    folder.write(tmp_path / "run", job, recording(job, FAULT.name))
    assert RankData(open_run(tmp_path / "run").ranks[0]).once(host_tables).empty


def looked_up(folder: Path, *, copied: bool = True, between: str = "", changes: int = 0) -> RankData:
    """Return steps of 20 ms that look up for 4 ms on the host; then a copy of 1 MB for 2 ms, and 8 ms of kernel."""
    events: list[Any] = []
    for n in range(3):
        t, number = n * 20 * MS, 10 * n
        events += [traces.step(n, t, 20 * MS), traces.op("aten::embedding", t, 4 * MS)]
        at = t + 4 * MS + 10 * US
        if between:
            events.append(traces.op(between, at, 100 * US))
        if copied:
            events += [
                traces.op("aten::to", at + 200 * US, 2 * MS),
                traces.call("cudaMemcpyAsync", at + 210 * US, 2 * MS - 20 * US, number + 1),
                traces.copy(at + 220 * US, 2 * MS - 40 * US, 1 << 20, correlation=number + 1),
            ]
        events += [traces.op("aten::mm", at + 3 * MS, 20 * US)]
        events += traces.launched("gemm", at + 3 * MS + 2 * US, at + 3 * MS + 10 * US, 8 * MS, number + 2)
        events += [traces.annotation("Optimizer.step#SGD.step", t + 16 * MS, 3 * MS)]
        if changes:
            events += [traces.op("aten::add_", t + 16 * MS + US, changes)]
        events += [traces.call("cudaStreamSynchronize", at + 3 * MS + 30 * US, 8 * MS, number + 3)]
    return runs.rank_of(folder, traces.trace(*events, world_size=1, device=runs.A100["name"]))


def test_what_works_on_the_host_between_the_lookup_and_its_copy_belongs_to_it(tmp_path: Path) -> None:
    (row,) = looked_up(tmp_path, between="aten::sum").once(host_tables).to_dict("records")
    assert (row["lookups"], row["lookup_ns"]) == (1, 4 * MS)
    assert (row["copies"], row["copy_bytes"]) == (1, 1 << 20)


def test_weights_that_the_optimizer_changes_on_the_host_go_with_them(tmp_path: Path) -> None:
    (row,) = looked_up(tmp_path, changes=2 * MS).once(host_tables).to_dict("records")
    assert row["optimizer_ns"] == 2 * MS


def test_a_lookup_whose_result_stays_on_the_host_is_none(tmp_path: Path) -> None:
    assert looked_up(tmp_path, copied=False).once(host_tables).empty
