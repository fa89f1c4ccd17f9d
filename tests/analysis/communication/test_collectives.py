"""Collectives, sends and receives: who takes part in each, matched over ranks, and who waits how long for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.collectives import (
    NO_GROUP,
    NO_PEERS,
    bare_waits,
    collectives,
    matched,
    point_to_point,
    unmatched,
    waits,
)
from dlprof.analysis.engine import RankData, by_rank
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import own_time, saving, saving_input
from dlprof.errors import NotMeasured
from dlprof.read.run import TRACE, Rank
from tests.fixtures import runs, traces
from tests.fixtures.exchanges import HANDED_ON, NEEDS, US, late_by, pipeline, run_of
from tests.fixtures.places import GOLDEN
from tests.fixtures.runs import MS, asked


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


PERIOD = 10 * MS
TRANSFER = 2 * MS
LATE = 3 * MS
HOST_LAG = (35 * MS, 4 * MS)  # rank 0's host is three steps further ahead than rank 1's

Make = Callable[[int, int, int], traces.Event]  # begin, duration, correlation → the collective's kernel


def kernel(name: str) -> Make:
    """Make a collective's kernel as torch before 2.4, NCCL 2.1x or RCCL writes it: nothing but a kernel's name."""
    return lambda begin, dur, correlation: traces.kernel(name, begin, dur, correlation, stream=21)


def job(make: Make | None = None, steps: Sequence[range] = (range(4), range(4))) -> list[dict[str, Any]]:
    """Make two ranks that compute 5 ms a step, rank 1 for 8 ms, and then exchange for 2 ms together.

    `make`: how the kernel is written; by default with torch's metadata and number. `steps`: those in a rank's window,
    which its profiler numbers from 0.
    """
    made = []
    for rank in (0, 1):
        busy = 5 * MS + rank * LATE
        events: list[Any] = []
        for n in steps[rank]:
            host = n * PERIOD - HOST_LAG[rank]
            begin, end = n * PERIOD + busy, n * PERIOD + 5 * MS + LATE + TRANSFER
            events += [
                traces.step(n - steps[rank][0], host, PERIOD),
                traces.launched("gemm", host + MS, n * PERIOD, busy, 100 + 2 * n),
                traces.call("cudaLaunchKernelExC", host + 2 * MS, 5_000, 101 + 2 * n),
            ]
            if make is not None:
                events.append(make(begin, end - begin, 101 + 2 * n))
                continue
            # A second one follows, to which both come at once.
            for k, (at, dur) in enumerate(((begin, end - begin), (end, MS))):
                told = traces.collective(at, dur, 1_000, correlation=101 + 2 * n)
                told["args"] |= {"Seq": 40 + 2 * n + k, "Comms Id": "77"}
                events.append(told)
        made.append(traces.trace(*events, rank=rank))
    return made


@pytest.mark.parametrize(
    "make",
    [
        None,
        kernel("ncclKernel_AllReduce_RING_LL_Sum_half(ncclWorkElem)"),
        kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"),
        kernel("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"),
    ],
    ids=["numbered", "all-reduce", "all-to-all", "generic"],
)
def test_the_last_to_start_is_waited_for_however_far_its_host_is_behind(tmp_path: Path, make: Make | None) -> None:
    run = run_of(tmp_path, job(make))
    frame = run.frame(matched)
    assert len(frame) == (6 if make else 12)
    assert by_rank(frame, "wait_ns") == {0: 3 * LATE, 1: 0}
    assert by_rank(run.frame(bare_waits), "waited_ns") == {0: 3 * LATE, 1: 0}


def test_numbers_match_whatever_was_traced_and_within_a_group(tmp_path: Path) -> None:
    frame = run_of(tmp_path / "windows", job(steps=(range(5), range(1, 6)))).frame(matched)
    assert sorted(frame["sequence"]) == [44, 44, 45, 45, 46, 46, 47, 47, 48, 48, 49, 49]
    assert by_rank(frame, "wait_ns") == {0: 3 * LATE, 1: 0}
    # Rank 1's profiler missed the first of a step: by order, its second would meet rank 0's first.
    made = job()
    made[1]["traceEvents"].remove(next(e for e in made[1]["traceEvents"] if e["args"].get("Seq") == 42))
    frame = run_of(tmp_path / "lost", made).frame(matched)
    assert sorted(frame["sequence"]) == [43, 43, 44, 44, 45, 45, 46, 46, 47, 47]
    assert by_rank(frame, "wait_ns") == {0: 2 * LATE, 1: 0}
    made = job()
    for rank, trace in enumerate(made):
        for n in range(4):
            # A second group's exchange of the same number; here rank 0 is the last to come.
            begin = n * PERIOD + 10 * MS + (1 - rank) * 500_000
            other = traces.collective(begin, n * PERIOD + 11 * MS - begin, 1_000, group="1", correlation=900 + n)
            other["args"] |= {"Seq": 40 + 2 * n, "Comms Id": "78"}
            call = traces.call("cudaLaunchKernelExC", n * PERIOD - HOST_LAG[rank] + 3 * MS, 5_000, 900 + n)
            trace["traceEvents"] += [call, other]
    frame = run_of(tmp_path / "groups", made).frame(matched)
    assert by_rank(frame[frame["group"] == "1"], "wait_ns") == {0: 0, 1: 3 * 500_000}
    assert by_rank(frame[frame["group"] == "0"], "wait_ns") == {0: 3 * LATE, 1: 0}


def test_each_waits_until_the_last_has_come_and_less_work_helps_until_another_is_slowest(tmp_path: Path) -> None:
    run = run_of(tmp_path, late_by(0, 600_000, 200_000))
    frame = run.frame(waits)
    assert by_rank(frame, "wait_ns") == {0: 3 * 600_000, 1: 0, 2: 3 * 400_000}
    assert by_rank(frame, "last") == {0: 0, 1: 3, 2: 0}
    assert by_rank(run.frame(own_time), "own_ns") == pytest.approx({0: 4 * MS, 1: 4.6 * MS, 2: 4.2 * MS})
    for less, saved in (
        ({1: 100_000}, 100_000),
        ({1: 5 * MS}, 400_000),
        ({0: 5 * MS, 2: 5 * MS}, 0.0),
        (dict.fromkeys(range(3), 300_000), 300_000),
    ):
        assert asked(run, saving, less) == pytest.approx(saved)


def test_ranks_that_starve_in_turn_lose_more_than_their_means_tell(tmp_path: Path) -> None:
    # Each rank waits 2 ms for data in every other step, in turn: every step is late, each rank's mean wait is 1 ms.
    logs = [[runs.light(n, 6 * MS, fetch_ns=2 * MS * ((n + r) % 2)) for n in range(43)] for r in range(2)]
    facts = {"device": {"type": "cuda"}, "host": "node-1"}
    made = [(one, log, facts) for one, log in zip(late_by(0, 0), logs, strict=True)]
    run = runs.measured(runs.recorded(tmp_path / "run", *made), *NEEDS)
    assert asked(run, saving_input, {0: 1.0 * MS, 1: 1.0 * MS}) == pytest.approx(2 * MS, rel=0.06)
    assert asked(run, saving, {0: 1.0 * MS, 1: 1.0 * MS}) == pytest.approx(MS)


def test_a_missing_rank_and_what_does_not_overlap_abstain(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path / "missing", *late_by(0, 0, 0)[:2]), *NEEDS)
    with pytest.raises(NotMeasured, match="1 of 3 ranks missing"):
        run.frame(matched)
    assert not run.frame(own_time)["known"].any()
    made = late_by(0, 0, hosts=("node-1", "node-1"))
    for event in made[1]["traceEvents"]:
        event["ts"] += 3_000
    with pytest.raises(NotMeasured, match="do not match"):
        run_of(tmp_path / "apart", made).frame(matched)


@pytest.mark.parametrize(("after", "matches"), [(500_000, True), (2 * MS, False)])
def test_who_asks_last_may_find_it_done(tmp_path: Path, after: int, matches: bool) -> None:
    # Horovod exchanges in a thread of its own; its mark is of the waiting, once a step of 100 ms.
    made = []
    for rank, (begins, ends) in enumerate(((60 * MS, 80 * MS), (80 * MS + after, 81 * MS + after))):
        events: list[Any] = []
        for t in range(0, 500 * MS, 100 * MS):
            events += [traces.step(t // MS // 100, t, 100 * MS), traces.op("aten::mm", t, begins)]
            events.append(traces.annotation("horovod:all_reduce", t + begins, ends - begins))
        made.append(traces.trace(*events, rank=rank, world_size=2, device="", backend="", host="node-1"))
    run = run_of(tmp_path, made)
    if matches:
        assert run.frame(waits).groupby("rank")["wait_ns"].mean().to_dict() == {0: 20 * MS, 1: 0}
    else:
        with pytest.raises(NotMeasured, match="do not overlap"):
            run.frame(waits)


@pytest.mark.parametrize(
    ("kind", "begins", "ends", "waited", "last"),
    [
        # The giver of a broadcast goes on; rank 1 comes after that, rank 2 has been waiting.
        ("broadcast", (MS, 2 * MS, 0), (1_300_000, 2_100_000, 1_200_000), (0, 0, MS), (True, False, False)),
        # One that stays until the last receiver came has waited.
        ("broadcast", (0, MS), (1_500_000, 1_500_000), (MS, 0), (False, True)),
        # Only the receiver of a reduction waits.
        ("reduce", (0, MS, 200_000), (1_300_000, 1_200_000, 400_000), (MS, 0, 0), None),
    ],
)
def test_who_gives_waits_for_nobody_unless_it_stays(
    kind: str, begins: Any, ends: Any, waited: Any, last: Any, tmp_path: Path
) -> None:
    ranks, name = tuple(range(len(begins))), f"ncclDevKernel_{kind.capitalize()}_RING_LL"
    made = []
    for rank, begin in enumerate(begins):
        event = traces.collective(begin, ends[rank] - begin, 1_000, kind, kernel_name=name, ranks=ranks)
        both = traces.collective(3 * MS, MS, 1_000, ranks=ranks)
        made.append(traces.trace(traces.step(0, 0, 5 * MS), event, both, rank=rank, world_size=len(ranks)))
    frame = run_of(tmp_path, made).frame(matched)
    frame = frame[frame["collective"] == kind].set_index("rank")
    assert frame["wait_ns"].to_dict() == dict(enumerate(waited))
    assert last is None or frame["last"].to_dict() == dict(enumerate(last))


def test_the_real_gloo_pair_matches(tmp_path: Path) -> None:
    for n in range(2):
        (tmp_path / f"rank{n}.json.gz").write_bytes((GOLDEN / f"gloo_rank{n}.json.gz").read_bytes())
    frame = runs.measured(tmp_path, *NEEDS).frame(matched)
    assert set(frame["collective"]) >= {"all_reduce"}
    assert (frame.groupby("instance")["rank"].nunique() == 2).all()
    assert (frame.groupby("instance")["wait_ns"].min() == 0).all()


@pytest.mark.parametrize(
    ("stages", "waited"),
    [
        (HANDED_ON, [("0,1", 1, MS), ("1,2", 2, 2_800_000), ("2,1", 1, 1_600_000), ("1,0", 0, 5_400_000)]),
        # A sender that is rid of its bytes waits for nobody; one that stays has waited.
        (([("send", 1, 1_000, 1_100)], [("recv", 0, 2_000, 2_300)]), []),
        (([("send", 1, 1_000, 2_300)], [("recv", 0, 2_000, 2_300)]), [("0,1", 0, MS)]),
        # Sends of a pair match in their order, whatever lies between.
        (
            (
                [("send", 1, 100, 200), ("send", 2, 300, 400), ("send", 1, 500, 600)],
                [("recv", 0, 50, 200), ("recv", 0, 450, 600)],
                [("recv", 0, 0, 400)],
            ),
            [("0,1", 1, 100_000), ("0,2", 2, 300_000)],
        ),
    ],
)
def test_a_receiver_waits_for_what_is_sent_to_it(stages: Any, waited: Any, tmp_path: Path) -> None:
    frame = run_of(tmp_path, pipeline(*stages)).frame(matched).groupby(["members", "rank"])["wait_ns"].sum()
    assert frame[frame > 0].to_dict() == {(members, rank): ns for members, rank, ns in waited}
    assert len(frame) == 2 * len({members for members, _ in frame.index})


@pytest.mark.parametrize(
    ("stages", "told", "why"),
    [
        # One more on one side; received before it was sent; to nobody knows whom.
        (([("send", 1, 1_000, 1_500)], [("recv", 0, 0, 1_500), ("recv", 0, 2_000, 2_100)]), True, "do not match"),
        (([("send", 1, 1_000, 1_500)], [("recv", 0, 0, 900)]), True, "do not match"),
        (HANDED_ON, False, NO_PEERS),
    ],
)
def test_sends_that_cannot_match_are_left_out(tmp_path: Path, stages: Any, told: bool, why: str) -> None:
    run = run_of(tmp_path, pipeline(*stages, told=told))
    with pytest.raises(NotMeasured, match="sends and receives do not match" if told else "between which ranks"):
        run.frame(matched)
    assert why in run.frame(unmatched)


def test_sends_between_hosts_need_clocks_that_collectives_bring_together(tmp_path: Path) -> None:
    one, other = (
        [("send", 1, 1_000, 1_500), ("recv", 1, 1_600, 3_000)],
        [("recv", 0, 0, 1_500), ("send", 0, 2_000, 3_000)],
    )
    made = pipeline(one, other, hosts=("node-1", "node-2"))
    for event in made[1]["traceEvents"]:
        event["ts"] += 20_000
    with pytest.raises(NotMeasured, match="clocks"):
        run_of(tmp_path / "without", made).frame(matched)
    for rank, trace in enumerate(made):
        trace["traceEvents"].append(traces.collective(4 * MS + 20 * MS * rank, MS, 1_000))
    frame = run_of(tmp_path / "with", made).frame(matched)
    assert by_rank(frame[frame["collective"] == "send"], "wait_ns") == {0: 400_000, 1: MS}


def test_the_threads_that_gloo_sends_in_match_nothing(tmp_path: Path) -> None:
    # Each rank has one exchange in each of its two threads, not the same one: only their order is that of the other.
    made = []
    for rank in (0, 1):
        events = [traces.step(n, n * 10 * MS, 10 * MS) for n in range(4)]
        for n, k in ((n, k) for n in range(4) for k in range(2)):
            thread = 501 + (k + n * rank) % 2
            events.append(traces.annotation("gloo:all_reduce", (n * 10 + 2 + 4 * k) * MS, 2 * MS, tid=thread))
        made.append(traces.trace(*events, rank=rank, world_size=2, device="", backend="gloo"))
    frame = run_of(tmp_path, made).frame(matched)
    assert (frame.groupby("instance")["start_ns"].nunique() == 1).all()
    assert by_rank(frame, "wait_ns") == {0: 0, 1: 0}


def test_of_waits_at_once_the_earliest_has_the_time_that_nothing_is_computed_in(tmp_path: Path) -> None:
    # ms: rank 0 comes at 1 and 2, and computes from 2.5 to 3; rank 1 comes at 4 to the one, and at 5 to the other.
    made = []
    for rank, (computes, begins) in enumerate([((2_500_000, 500_000), (MS, 2 * MS)), ((0, MS), (4 * MS, 5 * MS))]):
        events = [traces.step(0, 0, 8 * MS), traces.kernel("gemm", *computes)]
        for stream, at, end in zip((21, 22), begins, (6 * MS, 7 * MS), strict=True):
            events.append(traces.collective(at, end - at, 1_000, stream=stream))
        made.append(traces.trace(*events, rank=rank))
    frame = run_of(tmp_path, made).frame(bare_waits)
    told = frame.sort_values(["rank", "start_ns"])[["rank", "by", "wait_ns", "waited_ns"]]
    assert told.to_numpy().tolist() == [
        [0, 1, 3 * MS, 3 * MS - 500_000],  # from 1 to 4, but for what it computed
        [0, 1, 3 * MS, MS],  # from 2 to 5: what is before 4 is the first one's
        [1, 1, 0, 0],
        [1, 1, 0, 0],
    ]


@pytest.mark.parametrize(
    ("computes", "costs"),
    [
        # It computes while it waits, which would have hidden the first transfer: that lies open, because it is ahead.
        (2 * MS, 1_500_000 + 500_000),
        # It has nothing to compute: the transfer would lie open in any case.
        (MS, MS + 1_500_000),
    ],
)
def test_a_transfer_that_lies_open_for_being_ahead_is_waiting_too(tmp_path: Path, computes: int, costs: int) -> None:
    made = []
    for rank, (ends, ready) in enumerate([(computes, (MS, 2_500_000)), (4 * MS, (2 * MS, 4 * MS))]):
        events: list[Any] = [traces.step(0, 0, 4_500_000), traces.kernel("gemm", 0, ends)]
        for begin, over in zip(ready, (2_500_000, 4_500_000), strict=True):
            events.append(traces.collective(begin, over - begin, 1_000))
        made.append(traces.trace(*events, rank=rank))
    run = run_of(tmp_path, made)
    assert by_rank(run.frame(waits), "wait_ns") == {0: costs, 1: 0}
    assert asked(run, saving, {1: 9 * MS}) == pytest.approx(costs)
