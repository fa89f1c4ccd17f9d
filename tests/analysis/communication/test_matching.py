"""Collectives matched over ranks: a known culprit, known waits, skewed clocks, and what cannot be matched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.communication.matching import NO_PEERS, bare_waits, matched, unmatched, waits
from dlprof.analysis.engine import by_rank
from dlprof.analysis.step.savings import own_time, saving, saving_input
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.exchanges import HANDED_ON, NEEDS, late_by, pipeline, run_of
from tests.fixtures.places import GOLDEN
from tests.fixtures.runs import MS, asked

PERIOD = 10 * MS
TRANSFER = 2 * MS
LATE = 3 * MS
HOST_LAG = (35 * MS, 4 * MS)  # rank 0's host is three steps further ahead than rank 1's

Make = Callable[[int, int, int], traces.Event]  # begin, duration, correlation → the collective's kernel


def reduces(begin: int, dur: int, correlation: int) -> traces.Event:
    """Make an all-reduce as torch before 2.4 writes it: nothing but a kernel's name."""
    return traces.kernel("ncclKernel_AllReduce_RING_LL_Sum_half(ncclWorkElem)", begin, dur, correlation, stream=21)


def exchanges(begin: int, dur: int, correlation: int) -> traces.Event:
    """Make an all-to-all as NCCL 2.1x writes it."""
    return traces.kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", begin, dur, correlation, stream=21)


def generic(begin: int, dur: int, correlation: int) -> traces.Event:
    """Make a collective as RCCL writes it: its kernel does not name its kind."""
    return traces.kernel("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", begin, dur, correlation, stream=2)


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
            told = traces.collective(begin, end - begin, 1_000, correlation=101 + 2 * n)
            told["args"] |= {"Seq": 40 + 2 * n, "Comms Id": "77"}
            # A second one follows, to which both come at once.
            after = traces.collective(end, MS, 1_000, correlation=101 + 2 * n)
            after["args"] |= {"Seq": 41 + 2 * n, "Comms Id": "77"}
            events += [told, after]
        made.append(traces.trace(*events, rank=rank))
    return made


@pytest.mark.parametrize("make", [None, reduces, exchanges, generic])
def test_the_last_to_start_is_waited_for_however_far_its_host_is_behind(tmp_path: Path, make: Make | None) -> None:
    run = run_of(tmp_path, job(make))
    frame = run.frame(matched)
    assert len(frame) == (6 if make else 12)
    assert by_rank(frame, "wait_ns") == {0: 3 * LATE, 1: 0}
    assert set(frame["rank"][frame["wait_ns"] > 0]) == {0}
    assert by_rank(run.frame(bare_waits), "waited_ns") == {0: 3 * LATE, 1: 0}


def test_windows_of_other_steps_share_what_is_numbered_alike(tmp_path: Path) -> None:
    frame = run_of(tmp_path, job(steps=(range(5), range(1, 6)))).frame(matched)
    assert sorted(frame["sequence"]) == [44, 44, 45, 45, 46, 46, 47, 47, 48, 48, 49, 49]
    assert by_rank(frame, "wait_ns") == {0: 3 * LATE, 1: 0}


def test_what_a_rank_did_not_trace_shifts_no_other_by_one(tmp_path: Path) -> None:
    made = job()
    # Rank 1's profiler missed the first of a step: by order, its second would meet rank 0's first.
    lost = next(e for e in made[1]["traceEvents"] if e["args"].get("Seq") == 42)
    made[1]["traceEvents"].remove(lost)
    frame = run_of(tmp_path, made).frame(matched)
    assert sorted(frame["sequence"]) == [43, 43, 44, 44, 45, 45, 46, 46, 47, 47]
    assert by_rank(frame, "wait_ns") == {0: 2 * LATE, 1: 0}


def test_groups_that_are_numbered_alike_are_told_apart(tmp_path: Path) -> None:
    made = job()
    for rank, trace in enumerate(made):
        for n in range(4):
            # A second group's exchange of the same number; here rank 0 is the last to come.
            begin = n * PERIOD + 10 * MS + (1 - rank) * 500_000
            other = traces.collective(begin, n * PERIOD + 11 * MS - begin, 1_000, group="1", correlation=900 + n)
            other["args"] |= {"Seq": 40 + 2 * n, "Comms Id": "78"}
            call = traces.call("cudaLaunchKernelExC", n * PERIOD - HOST_LAG[rank] + 3 * MS, 5_000, 900 + n)
            trace["traceEvents"] += [call, other]
    frame = run_of(tmp_path, made).frame(matched)
    assert by_rank(frame[frame["group"] == "1"], "wait_ns") == {0: 0, 1: 3 * 500_000}
    assert by_rank(frame[frame["group"] == "0"], "wait_ns") == {0: 3 * LATE, 1: 0}


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
    with pytest.raises(NotMeasured, match="1 of 3 ranks missing"):
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
    assert run.frame(unmatched) == NO_PEERS


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
