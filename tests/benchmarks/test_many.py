"""Jobs of many ranks: the ways to read them agree, hosts that are copies are one job, and its faults are named."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import many_ranks
from benchmarks.tasks import measure
from benchmarks.thousand import stamp
from benchmarks.thousand.jobs import RECORDING, Planted, job
from benchmarks.thousand.measure import named
from dlprof.analysis.communication.collectives import matched
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.result.stored import to_json
from simulator.job import BASE_NS
from tests.fixtures import runs, traces

pytestmark = pytest.mark.slow


def test_the_ways_give_the_same(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="needs the extra dask")
    for r in range(3):
        traces.write(tmp_path / "traces" / f"rank{r}.json.gz", traces.training(rank=r, world_size=3))
    *rows, last = many_ranks.measured(tmp_path / "traces", list(many_ranks.WAYS), [1, 2], 1)
    assert last == {"same": True}
    assert [(row["way"], row["processes"]) for row in rows] == [(way, n) for way in many_ranks.WAYS for n in (1, 2)]
    assert all(row["cpu_s"] > 0 for row in rows)


@pytest.mark.skipif(shutil.which("strace") is None or os.geteuid() != 0, reason="it takes strace, and root for hosts")
def test_a_task_makes_as_many_calls_among_many_as_among_few() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DLPROF_", "SLURM_", "OMPI_"))}
    few, many = (measure(size, env) for size in (16, 64))
    for when in ("start", "end"):
        for kind in ("stat", "open", "make", "list"):
            # A hundredth of all tasks reads what all have left.
            assert many[when][kind] / 64 < 1.3 * few[when][kind] / 16 + 2, (when, kind)
    assert few["end"]["list"] > 0


SHORT = replace(RECORDING, steps=16, skip=4, active=3)
SHAPE = (4, 2)  # micro-batches, blocks of a stage
PLANTED = Planted(rank=2.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("many") / "run"
    stamp.write(at, job(64, PLANTED, SHAPE), SHORT)
    return at


def trace(at: Path, rank: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(gzip.decompress((at / f"ranks/{rank:05d}/trace.json.gz").read_bytes()))
    return read


def test_a_copy_differs_in_its_ranks_and_its_clock_alone(made: Path) -> None:
    many = job(64, PLANTED, SHAPE)
    first, second, *_ = (n for n, of in enumerate(many.copied) if of == 2)
    one, other = (trace(made, host * 8 + 1) for host in (first, second))
    assert one["distributedInfo"]["rank"] == first * 8 + 1
    assert {g["pg_name"]: len(g["ranks"]) for g in one["distributedInfo"]["pg_config"]} == {"0": 64, "2": 16}
    assert one["baseTimeNanoseconds"] - BASE_NS == stamp.CLOCKS_NS[first % len(stamp.CLOCKS_NS)]
    assert one["host_name"] == f"node-{first + 1}"

    def told(event: dict[str, Any], shift: int) -> dict[str, Any]:
        args = {k: v for k, v in event.get("args", {}).items() if k not in ("Comms Id", "Process Group Ranks")}
        args |= {k: args[k] - shift for k in ("Src Rank", "Dst Rank") if k in args}
        name = re.sub(r"(?<=nccl:)(send|recv) (\d+)(->|<-)(\d+)", _moved(shift), event["name"])
        return {**event, "name": name, "args": args}

    assert len(one["traceEvents"]) == len(other["traceEvents"]) > 1_000
    for mine, theirs in zip(one["traceEvents"], other["traceEvents"], strict=True):
        assert told(mine, first * 8) == told(theirs, second * 8)


def _moved(shift: int) -> Any:
    return lambda m: f"{m[1]} {int(m[2]) - shift}{m[3]}{int(m[4]) - shift}"


def test_the_ranks_of_all_hosts_exchange_with_each_other(made: Path) -> None:
    frame = runs.measured(made, matched).frame(matched)
    groups = frame[frame["collective"] == "all_reduce"].groupby("instance")["rank"].nunique()
    assert (groups == 16).all()
    sent = frame[frame["collective"] == "send"].groupby("instance")["rank"].nunique()
    assert len(sent)
    assert (sent == 2).all()


def test_the_slow_rank_is_named(made: Path) -> None:
    many = job(64, PLANTED, SHAPE)
    result = to_json(diagnose(open_run(made), RULES, jobs=1))
    assert named(result, many, PLANTED) == {"slow rank": "straggler"}
