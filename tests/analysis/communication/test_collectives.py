"""Collectives, sends and receives of a rank: who takes part in each, as far as kernels, calls and groups name them."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.collectives import NO_GROUP, collectives, point_to_point
from dlprof.analysis.communication.matching import matched, unmatched
from dlprof.analysis.engine import RankData, by_rank
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.errors import NotMeasured
from dlprof.read.run import TRACE, Rank
from tests.fixtures import traces
from tests.fixtures.exchanges import US, run_of
from tests.fixtures.runs import MS


def experts(name: str, *groups: dict[str, Any], ends: tuple[int, ...] = (0, 0, 0, 0)) -> list[dict[str, Any]]:
    """Make four ranks, each in an expert-parallel kernel from 1, 2, 3 and 4 ms until 5 ms and so much more."""
    made = []
    for rank in range(4):
        start, end = (1 + rank) * MS, 5 * MS + ends[rank]
        events = [traces.step(n, n * 10 * MS, 10 * MS) for n in range(3)]
        events += [traces.kernel(name, n * 10 * MS + start, end - start, stream=21) for n in range(3)]
        one = traces.trace(*events, rank=rank, world_size=4)
        one["distributedInfo"]["pg_config"] += [g for g in groups if rank in g["ranks"]]
        made.append(one)
    return made


def group(name: str, desc: str, *ranks: int) -> dict[str, Any]:
    return {"pg_name": name, "pg_desc": desc, "pg_size": len(ranks), "ranks": list(ranks)}


DISPATCH = "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)"


PAIRS = (
    group("1", "EXPERT_MODEL_PARALLEL_GROUP", 0, 1),
    group("2", "EXPERT_MODEL_PARALLEL_GROUP", 2, 3),
    group("3", "EXPERT_DATA_PARALLEL_GROUP", 0, 2),
    group("4", "EXPERT_DATA_PARALLEL_GROUP", 1, 3),
)


def test_expert_parallel_kernels_meet_in_the_group_named_for_experts(tmp_path: Path) -> None:
    # The second pair is through 1 ms later than the first.
    frame = run_of(tmp_path, experts(DISPATCH, *PAIRS, ends=(0, 0, MS, MS))).frame(matched)
    assert set(frame["collective"]) == {"all_to_all"}
    assert set(frame["members"]) == {"0,1", "2,3"}
    assert by_rank(frame, "wait_ns") == {0: 3 * MS, 1: 0, 2: 3 * MS, 3: 0}


def test_without_smaller_groups_they_are_of_all_ranks(tmp_path: Path) -> None:
    run = run_of(tmp_path, experts(DISPATCH))
    assert by_rank(run.frame(matched), "wait_ns") == {0: 9 * MS, 1: 6 * MS, 2: 3 * MS, 3: 0}
    assert run.frame(unmatched) == ""


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        (DISPATCH, (group("1", "mesh_tp", 0, 1), group("2", "mesh_tp", 2, 3))),
        ("void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*)", ()),
    ],
)
def test_where_nobody_knows_with_whom_they_meet_nobody_waits(tmp_path: Path, name: str, groups: Any) -> None:
    run = run_of(tmp_path, experts(name, *groups))
    with pytest.raises(NotMeasured):
        run.frame(matched)
    assert run.frame(unmatched) == NO_GROUP


def test_kernels_of_an_unknown_group_leave_the_others_matched(tmp_path: Path) -> None:
    made = experts(DISPATCH, group("1", "mesh_tp", 0, 1), group("2", "mesh_tp", 2, 3))
    for rank, one in enumerate(made):
        one["traceEvents"] += [
            traces.collective(n * 10 * MS + (6 + rank % 2) * MS, (3 - rank % 2) * MS, 1_000, ranks=(0, 1, 2, 3))
            for n in range(3)
        ]
    run = run_of(tmp_path, made)
    assert by_rank(run.frame(matched), "wait_ns") == {0: 3 * MS, 1: 0, 2: 3 * MS, 3: 0}
    assert set(run.frame(matched)["collective"]) == {"all_reduce"}
    assert run.frame(unmatched) == NO_GROUP


def told(folder: Path, *events: Any, rank: int = 0, world_size: int = 4, **keys: Any) -> list[tuple[str, int]]:
    made = traces.trace(traces.step(0, 0, 5 * MS), *events, rank=rank, world_size=world_size, **keys)
    data = RankData(Rank(rank, {TRACE: traces.write(folder / "trace.json", made)}))
    frame = data.once(point_to_point)
    return list(zip(frame["collective"], frame["peer"], strict=True))


def test_kernels_tell_it_themselves(tmp_path: Path) -> None:
    sends = traces.sent("send", 1, MS, MS), traces.sent("recv", 3, 3 * MS, MS)
    assert told(tmp_path, *sends) == [("send", 1), ("recv", 3)]


def issued(name: str, peer: int, at: int) -> Any:
    key = "Dst Rank" if name == "send" else "Src Rank"
    return traces.op("record_param_comms", at, 2 * US, **{"Collective name": name, key: peer})


def batch(at: int, start: int, number: int) -> list[Any]:
    """Return the launch and the kernel of several sends and receives at once."""
    return traces.launched("ncclDevKernel_SendRecv(ncclDevKernelArgs)", at, start, MS, number, stream=21)


def test_of_a_batch_the_calls_before_its_launch_tell(tmp_path: Path) -> None:
    events = [
        issued("send", 1, 100 * US),
        issued("recv", 1, 110 * US),
        *batch(200 * US, MS, 5),
        issued("send", 3, 300 * US),
        *batch(400 * US, 3 * MS, 6),
    ]
    assert told(tmp_path, *events) == [("send", 1), ("recv", 1), ("send", 3)]


def test_a_kernel_that_no_call_came_before_may_be_a_collective(tmp_path: Path) -> None:
    events = [*batch(50 * US, MS, 5), issued("recv", 2, 300 * US), *batch(400 * US, 3 * MS, 6)]
    assert told(tmp_path, *events) == [("recv", 2)]


def test_calls_of_another_thread_are_another_kernels(tmp_path: Path) -> None:
    events = [issued("send", 1, 100 * US), {**issued("send", 2, 110 * US), "tid": 77}, *batch(200 * US, MS, 5)]
    assert told(tmp_path, *events) == [("send", 1)]


@pytest.mark.parametrize(("ranks", "peer"), [((0, 2), 2), ((0, 1, 2), -1)])
def test_in_a_group_of_two_there_is_only_withe_other(tmp_path: Path, ranks: tuple[int, ...], peer: int) -> None:
    assert told(tmp_path, traces.sent("send", 2, MS, MS, group="7", ranks=ranks, told=False)) == [("send", peer)]


def gloo(name: str, call: str, at: int, *inputs: str) -> list[Any]:
    args = {"Concrete Inputs": ["", "", *inputs]} if inputs else {}
    return [traces.op(call, at, 20 * US, **args), traces.annotation(f"gloo:{name}", at + 10 * US, MS)]


def test_gloos_ranges_are_the_calls_that_they_began_in(tmp_path: Path) -> None:
    events = [
        *gloo("send", "c10d::send", 0, "1", "0"),
        *gloo("recv", "c10d::recv_", 30 * US, "3", "0"),
        *gloo("send", "c10d::send", 3 * MS, "2", "0"),
    ]
    assert told(tmp_path, *events, device="", backend="gloo") == [("send", 1), ("recv", 3), ("send", 2)]


@pytest.mark.parametrize(("world_size", "peer"), [(2, 0), (3, -1)])
def test_gloo_without_inputs_tells_only_in_a_job_of_two(tmp_path: Path, world_size: int, peer: int) -> None:
    events = gloo("recv", "c10d::recv_", 0)
    found = told(tmp_path, *events, rank=1, world_size=world_size, device="", backend="gloo")
    assert found == [("recv", peer)]


@pytest.mark.parametrize(("name", "key"), [("send", "Dst Rank"), ("recv", "Src Rank")])
def test_torch_tells_the_others_number_in_the_group_and_its_rank(tmp_path: Path, name: str, key: str) -> None:
    # As torch 2.6 and later write it: "Rank" is the other's place among ranks 4 to 7, beside its rank in the job.
    event = traces.sent(name, 6, MS, MS, group="3", ranks=(4, 5, 6, 7), told=False)
    event["args"] |= {"Rank": 2, key: 6, "Seq": -1, "In split size": "[]", "Global rank start": 4}
    assert told(tmp_path, event, rank=5, world_size=8) == [(name, 6)]


def test_of_a_batch_torch_calls_coalesced_the_calls_tell(tmp_path: Path) -> None:
    events = [issued("send", 1, 100 * US), issued("recv", 3, 110 * US), *batch(200 * US, MS, 5)]
    events[-1]["args"] |= {"Collective name": "coalesced", "Process Group Name": "0", "dtype": "BFloat16"}
    assert told(tmp_path, *events) == [("send", 1), ("recv", 3)]


def test_an_older_trace_tells_by_torchs_marks(tmp_path: Path) -> None:
    # Before "Dst Rank": the mark around the launch names both places in the group.
    events = [
        traces.annotation("nccl:send 1->2", 100 * US, 120 * US),
        *batch(200 * US, MS, 5),
        traces.annotation("nccl:recv 1<-0", 300 * US, 120 * US),
        *batch(400 * US, 3 * MS, 6),
    ]
    assert told(tmp_path, *events, rank=1) == [("send", 2), ("recv", 0)]


@pytest.mark.parametrize(
    ("named", "pieces"),
    [("3,5>4,1", "3,5>4,1"), (">", ">"), ("3,5", ""), ("3,5>4", ""), ("a,5>4,1", ""), ("3,,5>1,2,3", ""), ("", "")],
)
def test_our_ranges_tell_what_gloo_sends_where(tmp_path: Path, named: str, pieces: str) -> None:
    """The range around the call is the first one's, as the call is: gloo does the work in a thread of its own."""
    events: list[Any] = []
    for n in range(3):
        t = n * 10 * MS
        events += [
            traces.step(n, t, 10 * MS),
            traces.op("aten::mm", t, MS),
            traces.annotation(f"dlprof::all_to_all {named}", t + 2 * MS, MS),
            traces.op("c10d::alltoall_base_", t + 2 * MS + 1_000, 100_000),
            traces.annotation("gloo:all_to_all", t + 2 * MS + 2_000, MS, tid=9),
        ]
    made = traces.trace(*events, world_size=1, backend="gloo", device="")
    frame = run_of(tmp_path, [made]).frame(collectives)
    assert frame["pieces"].tolist() == [pieces] * 3


def on_the_host(device: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
    """Make two ranks that compute 4 ms on a GPU and meet in a gloo all-reduce until 28 ms, from 6 and from 26 ms on."""
    made = []
    for rank, start in enumerate((6 * MS, 26 * MS)):
        events: list[Any] = []
        for n in range(3):
            at = n * 30 * MS
            events += [traces.step(n, at, 30 * MS), *device]
            events += traces.launched("gemm", at + US, at + MS, 4 * MS, 2 * n + 1)
            events.append(traces.op("c10d::allreduce_", at + start - 20 * US, 10 * US))
            events.append(traces.annotation("gloo:all_reduce", at + start, 28 * MS - start, tid=9))
            events.append(traces.on_device("gpu_user_annotation", "gloo:all_reduce", at + 28 * MS, US, 20, 0))
            events.append(traces.copy(at + 28 * MS, US, 1024, "HtoD (Pinned -> Device)", 2 * n + 2, stream=20))
            events.append(traces.call("cudaMemcpyAsync", at + 28 * MS - 5 * US, US, 2 * n + 2, tid=9))
        made.append(traces.trace(*events, rank=rank, backend="gloo"))
    return made


def test_gloo_exchanges_on_the_host_what_is_on_a_gpu(tmp_path: Path) -> None:
    run = run_of(tmp_path, on_the_host())
    frame = run.frame(matched)
    assert (set(frame["collective"]), len(frame)) == ({"all_reduce"}, 6)
    assert by_rank(frame, "wait_ns") == {0: 60 * MS, 1: 0}
    exchanged = part(run.frame(breakdown), "communication")
    assert exchanged == {0: pytest.approx(22 * MS, rel=0.01), 1: pytest.approx(2 * MS, rel=0.01)}


def test_beside_exchanges_of_the_device_those_on_the_host_are_no_communication(tmp_path: Path) -> None:
    run = run_of(tmp_path, on_the_host((traces.collective(MS, MS, 1000, ranks=(0, 1)),)))
    assert (run.frame(matched)["end_ns"] - run.frame(matched)["start_ns"]).unique().tolist() == [MS]
