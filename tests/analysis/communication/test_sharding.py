"""FSDP2's own work on its units: what of it communicates is left out, and who does not shard is not asked."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.sharding import sharding
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS

# Two blocks of which each half is sharded by itself, and what is left.
UNITS = (" (blocks.0.a)", " (blocks.0.b)", " (blocks.1.a)", " (blocks.1.b,blocks.1.c)", "")


def sharded(folder: Path, **facts: Any) -> Path:
    """Record two CPU ranks: in each step of 20 ms FSDP2 copies for 0.6 ms and communicates for 0.8 for each unit."""
    ranks = []
    for rank in range(2):
        events: list[Any] = []
        for n in range(20, 23):
            t = (n - 20) * 20 * MS
            events += [traces.step(n, t, 20 * MS), traces.op("aten::mm", t, 5 * MS)]
            for k, unit in enumerate(UNITS):
                at = t + 5 * MS + k * 2 * MS
                events += [
                    traces.annotation(f"FSDP::pre_forward{unit}", at, MS),
                    traces.annotation(f"FSDP::all_gather{unit}", at, 700_000),
                    traces.op("aten::copy_", at, 600_000),
                    traces.annotation("gloo:all_gather", at + 600_000, 400_000),
                    traces.annotation(f"FSDP::post_backward_reduce{unit}", at + MS, 400_000),
                    traces.annotation("gloo:all_reduce", at + MS, 400_000),
                ]
        steps = [runs.light(n, 20 * MS, profiled=int(n >= 20)) for n in range(23)]
        ranks.append((traces.trace(*events, rank=rank, backend="gloo", device=""), steps, {**runs.CPU, **facts}))
    return runs.recorded(folder / "run", *ranks)


def test_units_and_the_work_on_them(tmp_path: Path) -> None:
    frame = runs.measured(sharded(tmp_path), sharding).frame(sharding).set_index("rank")
    assert frame["units"].to_dict() == {0: 5, 1: 5}
    assert frame["parents"].to_dict() == {0: 3, 1: 3}  # blocks.0, blocks.1, and all
    assert frame["around_ns"].to_dict() == pytest.approx({0: 3 * MS, 1: 3 * MS})


def test_who_shards_nothing_abstains(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, traces.training(), traces.training(rank=1)), sharding)
    with pytest.raises(NotMeasured, match="FSDP2"):
        run.frame(sharding)
