"""What a run tells of how its job scales, against the simulated machine that it ran on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dlprof.analysis.engine import measure
from dlprof.analysis.throughput.rates import MOST_TRANSFERS, scaling
from dlprof.errors import DoesNotApply
from dlprof.read.run import open_run
from dlprof.result.scale import Scaling
from simulator import folder
from simulator.faults.fault import base, recording, step_of
from simulator.hardware import transfer_ns


def of(path: Path, ranks: int, hosts: int = 1) -> Scaling:
    job = replace(base(1, ranks), hosts=hosts)
    folder.write(path, job, recording(job, "x"))
    return measure(open_run(path), [scaling], 1).frame(scaling)


def test_collectives_by_size_without_waiting(tmp_path: Path) -> None:
    found = of(tmp_path / "run", 4, hosts=2)
    job = base(1, 4)
    assert 1 <= len(found.transfers) <= MOST_TRANSFERS
    for row in found.transfers:
        assert (row.collective, row.ranks, row.hosts) == ("all_reduce", 4, 2)
        assert row.bytes is not None
        assert row.transfer_ns == pytest.approx(transfer_ns("all_reduce", round(row.bytes), 4, job.link), rel=0.06)
    # All gradients once a step, in 32 bits.
    moved = sum(row.count * (row.bytes or 0) for row in found.transfers)
    assert moved == pytest.approx(4 * job.model.parameters, rel=0.05)


def test_how_far_ranks_are_apart(tmp_path: Path) -> None:
    found = of(tmp_path / "run", 4)
    for values in (found.late_ns, found.uneven_ns):
        assert list(values) == sorted(values)
        assert abs(sum(values)) <= 1e-3 * sum(map(abs, values))
    assert len(found.uneven_ns) == 4
    assert found.wait_ns is not None
    assert found.transfer_ns is not None


def test_ranks_that_differ_for_good(tmp_path: Path) -> None:
    job = replace(base(1, 4), speeds=((0, 1.0), (1, 1.02), (2, 1.04), (3, 1.1)))
    folder.write(tmp_path / "run", job, recording(job, "x"))
    found = measure(open_run(tmp_path / "run"), [scaling], 1).frame(scaling)
    # The mean is 1.04; of four ranks, deviations count √(4 ÷ 3) as much.
    apart = step_of(job) * (1.1 - 1.04) * (4 / 3) ** 0.5
    assert found.uneven_ns[-1] == pytest.approx(apart, rel=0.15)


def test_one_rank_has_no_scaling(tmp_path: Path) -> None:
    with pytest.raises(DoesNotApply):
        of(tmp_path / "run", 1)
