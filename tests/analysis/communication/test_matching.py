"""Collectives matched over ranks: a known culprit, known waits and what they cost, and what cannot be matched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.collectives import NO_PEERS, bare_waits, matched, unmatched, waits
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
