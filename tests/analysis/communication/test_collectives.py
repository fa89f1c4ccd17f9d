"""Collectives, sends and receives of a rank: who takes part in each, as far as kernels, calls and groups name them."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.collectives import NO_GROUP, collectives, matched, point_to_point, unmatched
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


UNNAMED = (group("1", "mesh_tp", 0, 1), group("2", "mesh_tp", 2, 3))
LOW_LATENCY = "void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*)"


@pytest.mark.parametrize(
    ("name", "groups", "ends", "members", "waited"),
    [
        # The second pair is through 1 ms later than the first.
        (DISPATCH, PAIRS, (0, 0, MS, MS), {"0,1", "2,3"}, [3 * MS, 0, 3 * MS, 0]),
        # Without smaller groups they are of all ranks.
        (DISPATCH, (), (0,) * 4, {""}, [9 * MS, 6 * MS, 3 * MS, 0]),
        # Where nobody knows with whom they meet, nobody waits.
        (DISPATCH, UNNAMED, (0,) * 4, None, []),
        (LOW_LATENCY, (), (0,) * 4, None, []),
    ],
)
def test_expert_parallel_kernels_meet_in_the_group_named_for_experts(
    name: str, groups: Any, ends: tuple[int, ...], members: set[str] | None, waited: list[int], tmp_path: Path
) -> None:
    run = run_of(tmp_path, experts(name, *groups, ends=ends))
    assert run.frame(unmatched) == (NO_GROUP if members is None else "")
    if members is None:
        with pytest.raises(NotMeasured):
            run.frame(matched)
        return
    frame = run.frame(matched)
    assert (set(frame["collective"]), set(frame["members"])) == ({"all_to_all"}, members)
    assert by_rank(frame, "wait_ns") == dict(enumerate(waited))


def test_kernels_of_an_unknown_group_leave_the_others_matched(tmp_path: Path) -> None:
    made = experts(DISPATCH, *UNNAMED)
    for rank, one in enumerate(made):
        one["traceEvents"] += [
            traces.collective(n * 10 * MS + (6 + rank % 2) * MS, (3 - rank % 2) * MS, 1_000, ranks=(0, 1, 2, 3))
            for n in range(3)
        ]
    run = run_of(tmp_path, made)
    assert by_rank(run.frame(matched), "wait_ns") == {0: 3 * MS, 1: 0, 2: 3 * MS, 3: 0}
    assert set(run.frame(matched)["collective"]) == {"all_reduce"}
    assert run.frame(unmatched) == NO_GROUP


def issued(name: str, peer: int, at: int) -> Any:
    key = "Dst Rank" if name == "send" else "Src Rank"
    return traces.op("record_param_comms", at, 2 * US, **{"Collective name": name, key: peer})


def batch(at: int, start: int, number: int) -> list[Any]:
    """Return the launch and the kernel of several sends and receives at once."""
    return traces.launched("ncclDevKernel_SendRecv(ncclDevKernelArgs)", at, start, MS, number, stream=21)


def coalesced() -> list[Any]:
    events = [issued("send", 1, 100 * US), issued("recv", 3, 110 * US), *batch(200 * US, MS, 5)]
    events[-1]["args"] |= {"Collective name": "coalesced", "Process Group Name": "0", "dtype": "BFloat16"}
    return events


def of_group(name: str, key: str) -> Any:
    """Make an event as torch 2.6 and later do: "Rank" is the other's place among ranks 4 to 7, beside its rank."""
    event = traces.sent(name, 6, MS, MS, group="3", ranks=(4, 5, 6, 7), told=False)
    event["args"] |= {"Rank": 2, key: 6, "Seq": -1, "In split size": "[]", "Global rank start": 4}
    return event


def gloo(name: str, call: str, at: int, *inputs: str) -> list[Any]:
    args = {"Concrete Inputs": ["", "", *inputs]} if inputs else {}
    return [traces.op(call, at, 20 * US, **args), traces.annotation(f"gloo:{name}", at + 10 * US, MS)]


ON_CPU = {"device": "", "backend": "gloo"}
UNTOLD: dict[str, Any] = {"group": "7", "told": False}
TOLD: dict[str, tuple[list[Any], dict[str, Any], list[tuple[str, int]]]] = {
    "kernels": ([traces.sent("send", 1, MS, MS), traces.sent("recv", 3, 3 * MS, MS)], {}, [("send", 1), ("recv", 3)]),
    "the calls before a batch's launch": (
        [
            issued("send", 1, 100 * US),
            issued("recv", 1, 110 * US),
            *batch(200 * US, MS, 5),
            issued("send", 3, 300 * US),
            *batch(400 * US, 3 * MS, 6),
        ],
        {},
        [("send", 1), ("recv", 1), ("send", 3)],
    ),
    "what no call came before may be a collective": (
        [*batch(50 * US, MS, 5), issued("recv", 2, 300 * US), *batch(400 * US, 3 * MS, 6)],
        {},
        [("recv", 2)],
    ),
    "calls of another thread are another kernel's": (
        [issued("send", 1, 100 * US), {**issued("send", 2, 110 * US), "tid": 77}, *batch(200 * US, MS, 5)],
        {},
        [("send", 1)],
    ),
    "in a group of two there is only the other": (
        [traces.sent("send", 2, MS, MS, ranks=(0, 2), **UNTOLD)],
        {},
        [("send", 2)],
    ),
    "not in one of three": ([traces.sent("send", 2, MS, MS, ranks=(0, 1, 2), **UNTOLD)], {}, [("send", -1)]),
    "gloo's ranges are the calls that they began in": (
        [
            *gloo("send", "c10d::send", 0, "1", "0"),
            *gloo("recv", "c10d::recv_", 30 * US, "3", "0"),
            *gloo("send", "c10d::send", 3 * MS, "2", "0"),
        ],
        ON_CPU,
        [("send", 1), ("recv", 3), ("send", 2)],
    ),
    **{
        f"gloo's without inputs in a job of {n}": (
            gloo("recv", "c10d::recv_", 0),
            {"rank": 1, "world_size": n, **ON_CPU},
            [("recv", peer)],
        )
        for n, peer in ((2, 0), (3, -1))
    },
    **{
        f"a {name} by the number in the group and the rank": (
            [of_group(name, key)],
            {"rank": 5, "world_size": 8},
            [(name, 6)],
        )
        for name, key in (("send", "Dst Rank"), ("recv", "Src Rank"))
    },
    "coalesced": (coalesced(), {}, [("send", 1), ("recv", 3)]),
    # Before "Dst Rank": the mark around the launch names both places in the group.
    "an older trace's marks": (
        [
            traces.annotation("nccl:send 1->2", 100 * US, 120 * US),
            *batch(200 * US, MS, 5),
            traces.annotation("nccl:recv 1<-0", 300 * US, 120 * US),
            *batch(400 * US, 3 * MS, 6),
        ],
        {"rank": 1},
        [("send", 2), ("recv", 0)],
    ),
}


@pytest.mark.parametrize(("events", "keys", "expected"), TOLD.values(), ids=TOLD)
def test_with_whom_a_rank_exchanges_is_told(events: list[Any], keys: Any, expected: Any, tmp_path: Path) -> None:
    keys = {"rank": 0, "world_size": 4, **keys}
    made = traces.trace(traces.step(0, 0, 5 * MS), *events, **keys)
    data = RankData(Rank(keys["rank"], {TRACE: traces.write(tmp_path / "trace.json", made)}))
    frame = data.once(point_to_point)
    assert list(zip(frame["collective"], frame["peer"], strict=True)) == expected


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
