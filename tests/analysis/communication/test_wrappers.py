"""FSDP2's work on its units, DDP's search and DataParallel's copying, on hand-made traces."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.wrappers import replication, sharding, unused_search, unused_searches
from dlprof.errors import DoesNotApply, NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.exchanges import sharded
from tests.fixtures.runs import MS

SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"


def test_the_search_and_the_last_reduction_of_each_step_on_a_cpu(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(2):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.op("aten::mm", t, 300_000),
            traces.op(SEARCH, t + 300_000, 40_000),
            traces.op("aten::mm_backward", t + 350_000, 250_000),
            traces.annotation("gloo:all_reduce", t + 500_000, 300_000),
            traces.annotation("gloo:all_reduce", t + 590_000, 300_000),
        ]
    rank = runs.rank_of(tmp_path, traces.trace(*events, device="", backend="gloo"))
    rows = rank.once(unused_searches)
    # Of the last reduction 90 µs lie behind the gradients'.
    assert rows["search_ns"].tolist() == [40_000, 40_000]
    assert rows["flags_ns"].tolist() == [90_000, 90_000]


def test_waiting_for_a_late_rank_at_the_flags_is_not_theirs(tmp_path: Path) -> None:
    late = ((0, 200_000, 50_000), (90_000, 0, 0))  # of each rank in each step: it comes so late to the flags
    made: list[Any] = []
    for rank in range(2):
        events: list[Any] = []
        for n, mine in enumerate(late[rank]):
            t, last = n * MS, max(late[0][n], late[1][n])
            events += [
                traces.step(n, t, MS),
                traces.op(SEARCH, t, 40_000),
                traces.annotation("gloo:all_reduce", t + 300_000, 100_000),
                traces.op("aten::mm_backward", t + 400_000, 100_000 + mine),
                traces.annotation("gloo:all_reduce", t + 500_000 + mine, last - mine + 30_000),
            ]
        made.append((traces.trace(*events, rank=rank, device="", backend="gloo"), [], runs.CPU))
    frame = runs.measured(runs.recorded(tmp_path / "run", *made), unused_search).frame(unused_search)
    assert frame["search_ns"].tolist() == pytest.approx([40_000] * 2)
    assert frame["flags_ns"].tolist() == pytest.approx([30_000] * 2)
    assert frame["noise_ns"].tolist() == pytest.approx([0, 0], abs=1)


def test_on_a_gpu_the_flags_are_told_by_their_type(tmp_path: Path) -> None:
    flags = traces.collective(700_000, 20_000, 100, correlation=3)
    flags["args"]["dtype"] = "Int"
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.op(SEARCH, 300_000, 40_000),
        traces.launched("gemm", 0, 10_000, 500_000, 1),
        traces.collective(550_000, 100_000, 1_000, correlation=2),
        flags,
    )
    (row,) = runs.rank_of(tmp_path, made).once(unused_searches).to_dict("records")
    assert (row["search_ns"], row["flags_ns"]) == (40_000, 20_000)


def test_one_reduction_alone_is_the_gradients(tmp_path: Path) -> None:
    events = [
        traces.step(0, 0, MS),
        traces.op(SEARCH, 300_000, 40_000),
        traces.annotation("gloo:all_reduce", 500_000, 300_000),
    ]
    rank = runs.rank_of(tmp_path, traces.trace(*events, device="", backend="gloo"))
    assert rank.once(unused_searches)["flags_ns"][0] == 0


def test_without_a_search_it_abstains(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="no search"):
        runs.rank_of(tmp_path, traces.training(2)).once(unused_searches)


def test_data_parallels_copying_counts_once_on_any_thread(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.annotation("DataParallel.forward", 0, 600_000),
        traces.op("Scatter", 10_000, 20_000),
        traces.op("Broadcast", 40_000, 160_000),
        traces.op("Gather", 550_000, 50_000),
        traces.op("BroadcastBackward", 700_000, 200_000, tid=traces.AUTOGRAD),
        traces.op("ReduceAddCoalesced", 720_000, 150_000, tid=traces.AUTOGRAD),
        traces.kernel("gemm", 200_000, 300_000),
    )
    (row,) = runs.rank_of(tmp_path, made).once(replication).to_dict("records")
    assert (row["forward_ns"], row["copying_ns"]) == (600_000, 20_000 + 160_000 + 50_000 + 200_000)


def test_without_data_parallel_it_abstains(tmp_path: Path) -> None:
    with pytest.raises(DoesNotApply, match="DataParallel"):
        runs.rank_of(tmp_path, traces.training(2)).once(replication)


@pytest.mark.parametrize(("devices", "factor"), [(2, 1.0), (4, 1.5)])
def test_what_takes_data_parallels_place_is_an_all_reduce_beside_the_backward_pass(
    tmp_path: Path, devices: int, factor: float
) -> None:
    events: list[Any] = []
    for n in range(3):
        t, c = n * MS, 100 * n
        events += [traces.step(n, t, MS), traces.annotation("DataParallel.forward", t, 300_000)]
        for d in range(devices):
            events += [traces.call("cudaLaunchKernel", t + 10_000 + 10_000 * d, 2_000, c + 1 + d)]
            events += [traces.kernel("gemm", t + 100_000, 600_000, c + 1 + d, device=d)]
        events += [
            traces.op("ReduceAddCoalesced", t + 320_000, 50_000, tid=traces.AUTOGRAD),
            traces.call("cudaLaunchKernel", t + 330_000, 2_000, c + 50, tid=traces.AUTOGRAD),
            traces.kernel("ncclDevKernel_Reduce_Sum_f32_RING_LL(int)", t + 700_000, 200_000, c + 50),
        ]
    (row,) = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(replication).to_dict("records")
    assert row["copying_ns"] == 200_000
    assert row["reduced_ns"] == pytest.approx(factor * 200_000)
    assert row["backward_ns"] == pytest.approx(400_000)


def test_units_and_the_work_on_them(tmp_path: Path) -> None:
    frame = runs.measured(sharded(tmp_path), sharding).frame(sharding).set_index("rank")
    assert frame["units"].to_dict() == {0: 5, 1: 5}
    assert frame["parents"].to_dict() == {0: 3, 1: 3}  # blocks.0, blocks.1, and all
    assert frame["around_ns"].to_dict() == pytest.approx({0: 3 * MS, 1: 3 * MS})


def test_who_shards_nothing_abstains(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, traces.training(), traces.training(rank=1)), sharding)
    with pytest.raises(NotMeasured, match="FSDP2"):
        run.frame(sharding)
