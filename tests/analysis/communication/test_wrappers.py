"""FSDP2's work on its units, DDP's search and DataParallel's copying, and the rules that find the last two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.rules import data_parallel, unused_parameters
from dlprof.analysis.communication.wrappers import (
    bucket_copies,
    buffer_copies,
    replication,
    sharding,
    unused_search,
    unused_searches,
)
from dlprof.errors import DoesNotApply, NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.exchanges import sharded
from tests.fixtures.runs import MS

SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
US = 1_000
ON_CPU: dict[str, Any] = {"device": "", "backend": "gloo"}


def searching(t: int, *reduced: tuple[int, int]) -> list[Any]:
    """Return a step of 1 ms on a CPU: a search of 40 µs, computing until 600 µs, and gloo's all-reduces."""
    events = [traces.step(t // MS, t, MS), traces.op("aten::mm", t, 300 * US), traces.op(SEARCH, t + 300 * US, 40 * US)]
    events.append(traces.op("aten::mm_backward", t + 350 * US, 250 * US))
    return events + [traces.annotation("gloo:all_reduce", t + at * US, dur * US) for at, dur in reduced]


@pytest.mark.parametrize(
    ("reduced", "flags"),
    [
        (((500, 300), (590, 300)), 90 * US),  # so much of the last lies behind the gradients'
        (((500, 300),), 0),  # one alone is the gradients'
    ],
)
def test_the_search_and_the_last_reduction_of_each_step_on_a_cpu(reduced: Any, flags: int, tmp_path: Path) -> None:
    made = traces.trace(*searching(0, *reduced), *searching(MS, *reduced), **ON_CPU)
    rows = runs.rank_of(tmp_path, made).once(unused_searches)
    assert rows["search_ns"].tolist() == [40 * US] * 2
    assert rows["flags_ns"].tolist() == [flags] * 2


@pytest.mark.parametrize(
    ("module", "exchange", "copies"),
    [
        ("nn.Module:  (Net)", "gloo:broadcast", 170 * US),
        ("", "gloo:broadcast", None),
        ("nn.Module:  (Net)", "", 170 * US),
    ],
)
def test_what_copying_buffers_takes_before_the_forward_pass(
    tmp_path: Path, module: str, exchange: str, copies: int | None
) -> None:
    events: list[Any] = []
    for n in range(2):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.op("aten::mm", t, 50 * US),
            traces.annotation("DistributedDataParallel.forward", t + 100 * US, 600 * US),
            traces.op("aten::cat", t + 110 * US, 120 * US),
            traces.op("aten::copy_", t + 300 * US, 50 * US),
            traces.op("aten::conv2d", t + 410 * US, 200 * US),
        ]
        events += [traces.annotation(exchange, t + 230 * US, 60 * US)] if exchange else []
        events += [traces.annotation(module, t + 400 * US, 250 * US)] if module else []
    rank = runs.rank_of(tmp_path, traces.trace(*events, **ON_CPU))
    if copies is None:
        with pytest.raises(NotMeasured):
            rank.once(buffer_copies)
    else:
        assert rank.once(buffer_copies)["ns"].tolist() == [pytest.approx(copies)]


@pytest.mark.parametrize("exchange", ["gloo:all_reduce", ""])
def test_what_filling_and_emptying_buckets_takes(tmp_path: Path, exchange: str) -> None:
    events: list[Any] = []
    for n in range(2):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.op("torch::distributed::reducer::mul_out", t, 50 * US),
            traces.op("torch.distributed.ddp.reducer::search_unused_parameters", t + 60 * US, 90 * US),
            traces.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", t + 200 * US, 30 * US),
            traces.op("aten::copy_", t + 210 * US, 10 * US),
            traces.op("aten::copy_", t + 300 * US, 10 * US),
        ]
        events += [traces.annotation(exchange, t + 400 * US, 60 * US)] if exchange else []
    assert runs.rank_of(tmp_path, traces.trace(*events, **ON_CPU)).once(bucket_copies)["ns"].tolist() == [80 * US]


def test_buckets_that_were_not_traced_take_nothing_known(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.step(0, 0, MS), traces.op("aten::mm", 0, 50 * US), **ON_CPU))
    with pytest.raises(NotMeasured):
        rank.once(bucket_copies)


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
        made.append((traces.trace(*events, rank=rank, **ON_CPU), [], runs.CPU))
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


@pytest.mark.parametrize(
    ("ddp", "took", "state", "saving"),
    [
        ({}, 100_000, "found", 100_000),
        ({}, 5_000, "clear", 5_000),
        ({"unused_parameter_bytes": 4096}, 100_000, "clear", 0),
        ({"find_unused_parameters": False}, 100_000, "clear", 0),
        ({"unused_parameter_bytes": None}, 100_000, "not_measured", 0),
    ],
)
def test_a_search_is_found_where_none_is_unused(
    ddp: dict[str, Any], took: int, state: str, saving: int, tmp_path: Path
) -> None:
    events: list[Any] = []
    for t in range(0, 3 * MS, MS):
        search = traces.op(SEARCH, t + 500_000, took)
        events += [traces.step(t // MS, t, MS), traces.op("aten::mm", t, 500_000), search]
    told = {"parameters": 9, "ddp": {"find_unused_parameters": True, "unused_parameter_bytes": 0} | ddp}
    made = traces.trace(*events, world_size=1, **ON_CPU)
    outcome = ask(unused_parameters.RULE, runs.recorded(tmp_path / "run", (made, [], {**runs.CPU, "models": [told]})))
    assert outcome.state == state
    assert outcome.saving_ns == pytest.approx(saving)
    assert ("find_unused_parameters=False" in "".join(outcome.advice)) is (state == "found")


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


@pytest.mark.parametrize(("copying", "state"), [(250_000, "found"), (10_000, "clear")])
def test_data_parallel_is_found_with_what_it_copies(copying: int, state: str, tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(3):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.annotation("DataParallel.forward", t, 500_000),
            traces.op("Broadcast", t, copying),
            traces.launched("gemm", t + 100_000, t + 300_000, 700_000, n + 1),
        ]
    outcome = ask(data_parallel.RULE, runs.foreign(tmp_path, traces.trace(*events, world_size=1)))
    assert outcome.state == state
    assert outcome.share == pytest.approx(copying / MS)
    assert ("DistributedDataParallel" in "".join(outcome.advice)) is (state == "found")


def test_units_and_the_work_on_them(tmp_path: Path) -> None:
    frame = runs.measured(sharded(tmp_path), sharding).frame(sharding).set_index("rank")
    assert frame["units"].to_dict() == {0: 5, 1: 5}
    assert frame["parents"].to_dict() == {0: 3, 1: 3}  # blocks.0, blocks.1, and all
    assert frame["around_ns"].to_dict() == pytest.approx({0: 3 * MS, 1: 3 * MS})


def test_a_job_without_them_abstains(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path / "rank", traces.training(2))
    with pytest.raises(NotMeasured, match="no search"):
        rank.once(unused_searches)
    with pytest.raises(DoesNotApply, match="DataParallel"):
        rank.once(replication)
    with pytest.raises(NotMeasured, match="FSDP2"):
        rank.once(sharding)
    two = runs.foreign(tmp_path / "two", traces.training(3))
    assert ask(unused_parameters.RULE, two).state == "not_measured"
    facts = {"device": {"type": "cuda"}, "models": [{"parameters": 5, "data_parallel": False}]}
    recorded = runs.recorded(tmp_path / "run", (traces.training(3), [], facts))
    one = runs.foreign(tmp_path / "one", traces.training(3, world_size=1))
    for path in (two, recorded, one):
        assert ask(data_parallel.RULE, path).state == "does_not_apply"
