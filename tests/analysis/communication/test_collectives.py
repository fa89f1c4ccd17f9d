"""Collectives matched over ranks: a known culprit, known waits, skewed clocks, and what cannot be matched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.communication.collectives import NO_GROUP, collectives, exposed
from dlprof.analysis.communication.matching import UNTOLD, matched, unmatched
from dlprof.analysis.communication.waits import bare_waits, waits
from dlprof.analysis.engine import Measured, by_rank
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.savings import own_time, saving, saving_input
from dlprof.analysis.timeline.steps import step_means, step_series
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.places import GOLDEN
from tests.fixtures.runs import MS, asked

NEEDS = (bare_waits, breakdown, collectives, exposed, matched, own_time, step_means, step_series, waits)


def late_by(
    *late: int, steps: int = 3, skew: tuple[int, ...] = (), hosts: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Make ranks that compute 2 ms and `late` ns more, meet in an all-reduce of 1 ms, and compute 1 ms."""
    ends = max(late)
    period = 4 * MS + ends
    made = []
    for rank, extra in enumerate(late):
        events = []
        for n in range(steps):
            t = n * period + (skew[rank] if skew else 0)
            events += [
                traces.step(n, t, period),
                traces.kernel("gemm", t, 2 * MS + extra),
                traces.collective(t + 2 * MS + extra, MS + ends - extra, 1_000, ranks=tuple(range(len(late)))),
                traces.kernel("gemm", t + 3 * MS + ends, MS),
            ]
        host = hosts[rank] if hosts else "node-1"
        made.append(traces.trace(*events, rank=rank, world_size=len(late), host=host))
    return made


def run_of(folder: Path, made: list[dict[str, Any]]) -> Measured:
    return runs.measured(runs.foreign(folder, *made), *NEEDS)


def test_each_waits_until_the_last_has_come(tmp_path: Path) -> None:
    run = run_of(tmp_path, late_by(0, 600_000, 200_000))
    frame = run.frame(waits)
    assert by_rank(frame, "wait_ns") == {0: 3 * 600_000, 1: 0, 2: 3 * 400_000}
    assert by_rank(frame, "last") == {0: 0, 1: 3, 2: 0}
    assert by_rank(run.frame(own_time), "own_ns") == pytest.approx({0: 4 * MS, 1: 4.6 * MS, 2: 4.2 * MS})


def test_taking_work_from_the_slowest_helps_until_another_is(tmp_path: Path) -> None:
    run = run_of(tmp_path, late_by(0, 600_000, 200_000))
    assert asked(run, saving, {1: 100_000}) == pytest.approx(100_000)
    assert asked(run, saving, {1: 5 * MS}) == pytest.approx(400_000)
    assert asked(run, saving, {0: 5 * MS, 2: 5 * MS}) == 0.0
    assert asked(run, saving, dict.fromkeys(range(3), 300_000)) == pytest.approx(300_000)


@pytest.mark.parametrize("seed", range(4))
def test_many_ranks_with_clocks_50_ms_apart_name_the_culprit(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    late = [int(x) for x in rng.integers(0, 300_000, 24)]
    culprit = int(rng.integers(24))
    late[culprit] = 900_000
    per_host = rng.integers(-50 * MS, 50 * MS, 4)
    skew = tuple(100 * MS + int(per_host[r // 6]) for r in range(24))
    made = late_by(*late, skew=skew, hosts=tuple(f"node-{r // 6}" for r in range(24)))
    frame = run_of(tmp_path, made).frame(waits)
    last, waited = by_rank(frame, "last"), by_rank(frame, "wait_ns")
    assert max(last, key=lambda r: last[r]) == culprit
    assert waited == pytest.approx({r: 3 * (900_000 - x) for r, x in enumerate(late)}, abs=3)


def test_a_missing_rank_abstains(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, *late_by(0, 0, 0)[:2]), *NEEDS)
    with pytest.raises(NotMeasured, match="1 of 3 are not here"):
        run.frame(matched)
    assert not run.frame(own_time)["known"].any()


def test_collectives_that_do_not_overlap_are_no_match(tmp_path: Path) -> None:
    made = late_by(0, 0, hosts=("node-1", "node-1"))
    for event in made[1]["traceEvents"]:
        event["ts"] += 3_000
    with pytest.raises(NotMeasured, match="do not match"):
        run_of(tmp_path, made).frame(matched)


@pytest.mark.parametrize(("after", "matches"), [(500_000, True), (2 * MS, False)])
def test_who_asks_last_may_find_it_done(tmp_path: Path, after: int, matches: bool) -> None:
    # Horovod exchanges in a thread of its own; its mark is of the waiting, once a step of 100 ms.
    made = []
    for rank, (begins, ends) in enumerate(((60 * MS, 80 * MS), (80 * MS + after, 81 * MS + after))):
        events = [
            e
            for n in range(5)
            for e in (
                traces.step(n, 100 * n * MS, 100 * MS),
                traces.op("aten::mm", 100 * n * MS, begins),
                traces.annotation("horovod:all_reduce", 100 * n * MS + begins, ends - begins),
            )
        ]
        made.append(traces.trace(*events, rank=rank, world_size=2, device="", backend="", host="node-1"))
    run = run_of(tmp_path, made)
    if matches:
        assert run.frame(waits).groupby("rank")["wait_ns"].mean().to_dict() == {0: 20 * MS, 1: 0}
    else:
        with pytest.raises(NotMeasured, match="do not overlap"):
            run.frame(waits)


def test_groups_match_among_their_members_only(tmp_path: Path) -> None:
    def rank(r: int) -> dict[str, Any]:
        pair = (0, 1) if r < 2 else (2, 3)
        late = 300_000 * (r % 2) + 100_000 * (r // 2)
        event = traces.collective(MS + late, MS - late, 1_000, group="7", ranks=pair)
        made = traces.trace(traces.step(0, 0, 3 * MS), event, rank=r, world_size=4)
        made["distributedInfo"]["pg_config"].append({"pg_name": "7", "pg_size": 2, "ranks": list(pair)})
        return made

    frame = run_of(tmp_path, [rank(r) for r in range(4)]).frame(waits)
    assert by_rank(frame, "wait_ns") == {0: 300_000, 1: 0, 2: 300_000, 3: 0}


def test_ranks_that_starve_in_turn_lose_more_than_their_means_tell(tmp_path: Path) -> None:
    # Each rank waits 2 ms for data in every other step, in turn: every step is late, each rank's mean wait is 1 ms.
    made = late_by(0, 0)
    steps = [[runs.light(n, 6 * MS, fetch_ns=2 * MS * ((n + r) % 2)) for n in range(43)] for r in range(2)]
    facts = {"device": {"type": "cuda"}, "host": "node-1"}
    folder = runs.recorded(tmp_path / "run", *((m, s, facts) for m, s in zip(made, steps, strict=True)))
    run = runs.measured(folder, *NEEDS)
    assert asked(run, saving_input, {0: 1.0 * MS, 1: 1.0 * MS}) == pytest.approx(2 * MS, rel=0.06)
    assert asked(run, saving, {0: 1.0 * MS, 1: 1.0 * MS}) == pytest.approx(MS)


def test_a_broadcast_is_waited_for_and_its_giver_waits_for_nobody(tmp_path: Path) -> None:
    # Rank 0 gives and goes on. Rank 1 comes after that, rank 2 has been waiting.
    begins, lasts = (MS, 2 * MS, 0), (300_000, 100_000, 1_200_000)
    made = []
    for rank in range(3):
        events: list[Any] = [traces.step(0, 0, 5 * MS)]
        events.append(
            traces.collective(
                begins[rank],
                lasts[rank],
                1_000,
                "broadcast",
                ranks=(0, 1, 2),
                kernel_name="ncclDevKernel_Broadcast_RING_LL",
            )
        )
        events.append(traces.collective(3 * MS, MS, 1_000, ranks=(0, 1, 2)))
        made.append(traces.trace(*events, rank=rank, world_size=3))
    frame = run_of(tmp_path, made).frame(matched)
    given = frame[frame["collective"] == "broadcast"].set_index("rank")
    assert given["wait_ns"].to_dict() == {0: 0, 1: 0, 2: MS}
    assert given["last"].to_dict() == {0: True, 1: False, 2: False}


def test_a_giver_that_stays_until_the_last_receiver_came_has_waited(tmp_path: Path) -> None:
    made = []
    for rank, begin in enumerate((0, MS)):
        event = traces.collective(begin, 3 * MS // 2 - begin, 1_000, "broadcast", kernel_name="ncclDevKernel_Broadcast")
        made.append(traces.trace(traces.step(0, 0, 2 * MS), event, rank=rank))
    frame = run_of(tmp_path, made).frame(matched).set_index("rank")
    assert (frame["wait_ns"].to_dict(), frame["last"].to_dict()) == ({0: MS, 1: 0}, {0: False, 1: True})


def test_only_the_receiver_of_a_reduction_waits(tmp_path: Path) -> None:
    begins, ends = (0, MS, 200_000), (1_300_000, 1_200_000, 400_000)
    made = []
    for rank in range(3):
        event = traces.collective(
            begins[rank],
            ends[rank] - begins[rank],
            1_000,
            "reduce",
            ranks=(0, 1, 2),
            kernel_name="ncclDevKernel_Reduce_Sum_f32_RING_LL",
        )
        made.append(traces.trace(traces.step(0, 0, 2 * MS), event, rank=rank, world_size=3))
    frame = run_of(tmp_path, made).frame(matched).set_index("rank")
    assert frame["wait_ns"].to_dict() == {0: MS, 1: 0, 2: 0}


def test_the_real_gloo_pair_matches(tmp_path: Path) -> None:
    for n in range(2):
        (tmp_path / f"rank{n}.json.gz").write_bytes((GOLDEN / f"gloo_rank{n}.json.gz").read_bytes())
    frame = runs.measured(tmp_path, *NEEDS).frame(matched)
    assert set(frame["collective"]) >= {"all_reduce"}
    assert (frame.groupby("instance")["rank"].nunique() == 2).all()
    assert (frame.groupby("instance")["wait_ns"].min() == 0).all()


def pipeline(
    *stages: list[tuple[str, int, int, int]], hosts: tuple[str, ...] = (), told: bool = True
) -> list[dict[str, Any]]:
    """Make a rank of each list of (send or recv, peer, start, end) in µs, in one step of 10 ms."""
    made = []
    ranks = tuple(range(len(stages)))
    for rank, sends in enumerate(stages):
        events: list[Any] = [traces.step(0, 0, 10 * MS)]
        for name, peer, start, end in sends:
            events.append(traces.sent(name, peer, start * 1_000, (end - start) * 1_000, ranks=ranks, told=told))
        host = hosts[rank] if hosts else "node-1"
        made.append(traces.trace(*events, rank=rank, world_size=len(stages), host=host))
    return made


HANDED_ON = (
    [("send", 1, 1_000, 1_500), ("recv", 1, 1_600, 7_200)],
    [("recv", 0, 0, 1_500), ("send", 2, 3_000, 3_300), ("recv", 2, 3_400, 5_200), ("send", 0, 7_000, 7_200)],
    [("recv", 1, 200, 3_300), ("send", 1, 5_000, 5_200)],
)


def test_a_receiver_waits_for_what_is_sent_to_it(tmp_path: Path) -> None:
    frame = run_of(tmp_path, pipeline(*HANDED_ON)).frame(matched).set_index(["members", "rank"])
    assert frame["wait_ns"].to_dict() == {
        ("0,1", 0): 0,
        ("0,1", 1): MS,
        ("1,2", 1): 0,
        ("1,2", 2): 2_800_000,
        ("2,1", 1): 1_600_000,
        ("2,1", 2): 0,
        ("1,0", 0): 5_400_000,
        ("1,0", 1): 0,
    }


def test_a_sender_that_is_rid_of_its_bytes_waits_for_nobody(tmp_path: Path) -> None:
    made = pipeline([("send", 1, 1_000, 1_100)], [("recv", 0, 2_000, 2_300)])
    frame = run_of(tmp_path, made).frame(matched).set_index("rank")
    assert frame["wait_ns"].to_dict() == {0: 0, 1: 0}
    late = pipeline([("send", 1, 1_000, 2_300)], [("recv", 0, 2_000, 2_300)])
    frame = run_of(tmp_path / "late", late).frame(matched).set_index("rank")
    assert (frame["wait_ns"].to_dict(), frame["last"].to_dict()) == ({0: MS, 1: 0}, {0: False, 1: True})


def test_sends_of_a_pair_match_in_their_order_whatever_lies_between(tmp_path: Path) -> None:
    made = pipeline(
        [("send", 1, 100, 200), ("send", 2, 300, 400), ("send", 1, 500, 600)],
        [("recv", 0, 50, 200), ("recv", 0, 450, 600)],
        [("recv", 0, 0, 400)],
    )
    frame = run_of(tmp_path, made).frame(matched)
    assert by_rank(frame, "wait_ns") == {0: 0, 1: 100_000, 2: 300_000}


@pytest.mark.parametrize(
    "stages",
    [
        ([("send", 1, 1_000, 1_500)], [("recv", 0, 0, 1_500), ("recv", 0, 2_000, 2_100)]),  # one more on one side
        ([("send", 1, 1_000, 1_500)], [("recv", 0, 0, 900)]),  # received before it was sent
    ],
)
def test_sends_that_cannot_match_are_left_out(tmp_path: Path, stages: Any) -> None:
    run = run_of(tmp_path, pipeline(*stages))
    with pytest.raises(NotMeasured, match="sends and receives do not match"):
        run.frame(matched)
    assert "do not match" in run.frame(unmatched)


def test_sends_to_who_knows_whom_are_said_to_be_so(tmp_path: Path) -> None:
    run = run_of(tmp_path, pipeline(*HANDED_ON, told=False))
    with pytest.raises(NotMeasured, match="between which ranks"):
        run.frame(matched)
    assert run.frame(unmatched) == UNTOLD


def test_sends_between_hosts_need_clocks_that_collectives_bring_together(tmp_path: Path) -> None:
    hosts = ("node-1", "node-2")
    made = pipeline(
        [("send", 1, 1_000, 1_500), ("recv", 1, 1_600, 3_000)],
        [("recv", 0, 0, 1_500), ("send", 0, 2_000, 3_000)],
        hosts=hosts,
    )
    for event in made[1]["traceEvents"]:
        event["ts"] += 20_000
    run = run_of(tmp_path / "without", made)
    with pytest.raises(NotMeasured, match="clocks"):
        run.frame(matched)
    for rank, trace in enumerate(made):
        trace["traceEvents"].append(traces.collective(4 * MS + 20 * MS * rank, MS, 1_000))
    frame = run_of(tmp_path / "with", made).frame(matched)
    assert by_rank(frame[frame["collective"] == "send"], "wait_ns") == {0: 400_000, 1: MS}


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


def test_the_threads_that_gloo_sends_in_match_nothing(tmp_path: Path) -> None:
    # Each rank has one exchange in each of its two threads, not the same one: only their order is that of the other.
    made = []
    for rank in (0, 1):
        events = [traces.step(n, n * 10 * MS, 10 * MS) for n in range(4)]
        for n in range(4):
            for k in range(2):
                thread = 501 + (k + n * rank) % 2
                events.append(traces.annotation("gloo:all_reduce", (n * 10 + 2 + 4 * k) * MS, 2 * MS, tid=thread))
        made.append(traces.trace(*events, rank=rank, world_size=2, device="", backend="gloo"))
    frame = run_of(tmp_path, made).frame(matched)
    assert (frame.groupby("instance")["start_ns"].nunique() == 1).all()
    assert by_rank(frame, "wait_ns") == {0: 0, 1: 0}
