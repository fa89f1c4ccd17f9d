"""Blame: known culprits and causes in made runs of many ranks, on skewed clocks, and on the real eight ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.communication.blame import MOST_REASONS, accounts, blame, charged
from dlprof.analysis.communication.collectives import collectives
from dlprof.analysis.engine import Measured, by_rank
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import own_time
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.exchanges import held_up, late_by, meeting
from tests.fixtures.runs import MS, asked

NEEDS = (accounts, blame, charged, collectives, own_time)

HELD_UP = ("input_wait", "computation", "host", "copy")


def run_of(folder: Path, made: list[dict[str, Any]]) -> Measured:
    return runs.measured(runs.foreign(folder, *made), *NEEDS)


def rows(frame: pd.DataFrame) -> dict[tuple[int, int, str], float]:
    return {(int(r), int(c), str(k)): n for r, c, k, n in frame[["rank", "culprit", "category", "ns"]].to_numpy()}


@pytest.mark.parametrize("cause", HELD_UP)
def test_the_cause_is_named_though_the_late_rank_computes_while_the_others_wait(tmp_path: Path, cause: str) -> None:
    # All ranks compute last: a late rank does that while the others wait for it, whatever held it up before.
    run = run_of(tmp_path, held_up({}, {cause: MS}, {}))
    assert rows(run.frame(blame)) == pytest.approx({(0, 1, cause): MS, (2, 1, cause): MS})


def test_several_causes_share_the_blame_and_what_the_late_rank_does_less_takes_none(tmp_path: Path) -> None:
    run = run_of(tmp_path, held_up({"copy": 400_000}, {"input_wait": 600_000, "host": 200_000}))
    assert rows(run.frame(blame)) == pytest.approx({(0, 1, "input_wait"): 300_000, (0, 1, "host"): 100_000})


@pytest.mark.parametrize("ranks", [8, 64])
def test_many_ranks_on_hosts_whose_clocks_are_apart_blame_the_same_one(tmp_path: Path, ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    culprit = int(rng.integers(ranks))
    more = [{"computation": int(ns)} for ns in rng.integers(0, 100_000, ranks)]
    more[culprit] = {"input_wait": 2 * MS}
    per_host = rng.integers(-50 * MS, 50 * MS, ranks // 4)
    clocks = [100 * MS + int(per_host[r // 4]) for r in range(ranks)]
    made = held_up(*more, clocks=clocks, hosts=[f"node-{r // 4}" for r in range(ranks)])
    run = run_of(tmp_path, made)
    frame = run.frame(charged)
    assert set(frame["culprit"]) == {culprit}
    expected = {r: 3 * (2 * MS - more[r]["computation"]) for r in range(ranks) if r != culprit}
    assert by_rank(frame, "ns") == pytest.approx(expected, abs=3)
    # What the trace does not tell is the clocks' rounding, and no more.
    told = frame.groupby("category")["ns"].sum()
    assert told["input_wait"] == pytest.approx(sum(expected.values()), abs=10 * ranks)


def test_it_adds_up_to_the_waiting_however_many_reasons_there_are(tmp_path: Path) -> None:
    # Every rank is the last in one step: each waits for all the others, for a little.
    ranks = MOST_REASONS + 4
    more = [{"host": 100_000} if r else {} for r in range(ranks)]
    made = held_up(*more)
    steps = [held_up(*(more[r:] + more[:r]), steps=1) for r in range(ranks)]
    period = made[0]["traceEvents"][0]["dur"]
    for rank in range(ranks):
        made[rank]["traceEvents"] = [
            {**e, "ts": e["ts"] + n * period} | ({"name": f"ProfilerStep#{n}"} if "Profiler" in e["name"] else {})
            for n, step in enumerate(steps)
            for e in step[rank]["traceEvents"]
        ]
    run = run_of(tmp_path, made)
    frame, own = run.frame(blame), run.frame(own_time).set_index("rank")["wait_ns"]
    assert by_rank(frame, "ns") == pytest.approx(own[own > 0].to_dict())
    assert (frame.groupby("rank").size() <= MOST_REASONS + 1).all()


def test_stalls_that_no_traced_step_saw_are_blamed_as_all_steps_tell(tmp_path: Path) -> None:
    # Rank 1 saves for 10 ms in every tenth step, none of them traced; in those it also copies 1 ms longer.
    made = held_up({}, {"copy": MS}, {})
    length = 4 * MS
    steps = [[runs.light(n, length + 10 * MS * (n % 10 == 0)) for n in range(43)] for _ in range(3)]
    saved = [runs.stall("checkpoint", n, 10 * MS) for n in range(0, 43, 10)]
    facts = {"device": {"type": "cuda"}, "host": "node-1"}
    folder = runs.recorded(
        tmp_path / "run", *((m, s, facts) for m, s in zip(made, steps, strict=True)), stalls=[[], saved, []]
    )
    run = runs.measured(folder, *NEEDS)
    found, wait = rows(run.frame(blame)), run.frame(own_time).set_index("rank")["wait_ns"]
    steady = 40
    assert found[0, 1, "checkpoint"] == pytest.approx(min(4 * 10 * MS / steady, wait[0]))
    assert found[0, 1, "checkpoint"] + found.get((0, 1, "copy"), 0.0) == pytest.approx(wait[0])


def test_nobody_is_charged_more_than_the_late_rank_spent(tmp_path: Path) -> None:
    # The traced steps wait 1 ms longer for data on rank 1; the mean steady step waits for no more than 0.6 ms there.
    made = held_up({}, {"input_wait": MS})
    steps = [[runs.light(n, 4 * MS, fetch_ns=600_000 * r) for n in range(43)] for r in range(2)]
    facts = {"device": {"type": "cuda"}, "host": "node-1"}
    folder = runs.recorded(tmp_path / "run", *((m, s, facts) for m, s in zip(made, steps, strict=True)))
    run = runs.measured(folder, breakdown, *NEEDS)
    spent = asked(run, part, "input_wait")[1]
    found, wait = rows(run.frame(blame)), run.frame(own_time).set_index("rank")["wait_ns"]
    assert spent < wait[0]
    assert found == pytest.approx({(0, 1, "input_wait"): spent, (0, 1, "other"): wait[0] - spent})


def test_lateness_that_is_older_than_the_trace_has_no_cause(tmp_path: Path) -> None:
    made = late_by(0, 0, steps=1)
    # Rank 1 begins its only step 0.3 ms late, and meets the other at the same instant as ever.
    for event in made[1]["traceEvents"]:
        if event["name"] == "gemm" or event["name"].startswith("Profiler"):
            event["ts"] += 300
        elif event["name"].startswith("nccl"):
            event["ts"] += 300
            event["dur"] -= 300
    made[1]["traceEvents"][-1]["ts"] -= 300
    assert rows(run_of(tmp_path, made).frame(blame)) == pytest.approx({(0, 1, "other"): 300_000})


def test_groups_blame_within_themselves(tmp_path: Path) -> None:
    late = (0, 300_000, 0, 500_000)

    def rank(r: int) -> dict[str, Any]:
        pair = (0, 1) if r < 2 else (2, 3)
        events = [traces.kernel("gemm", 0, MS + late[r])]
        events.append(traces.collective(MS + late[r], MS - late[r], 1_000, group=f"{7 + r // 2}", ranks=pair))
        return traces.trace(traces.step(0, 0, 3 * MS), *events, rank=r, world_size=4)

    found = rows(run_of(tmp_path, [rank(r) for r in range(4)]).frame(charged))
    assert found == pytest.approx({(0, 1, "computation"): 300_000, (2, 3, "computation"): 500_000})


def test_the_blame_is_handed_on_to_where_the_chain_begins(tmp_path: Path) -> None:
    # Rank 1 comes late to rank 0, for it had waited for rank 2, which had waited for its data.
    made = meeting(3, ((1, 2),), ((0, 1),), late={2: ("input_wait", MS)})
    found = rows(run_of(tmp_path, made).frame(charged))
    # Rank 0 waits for the transfer between the others as well.
    assert found == pytest.approx(
        {(1, 2, "input_wait"): MS, (0, 2, "input_wait"): MS, (0, 1, "communication"): 100_000}
    )


def test_of_two_causes_in_a_chain_each_takes_its_part(tmp_path: Path) -> None:
    late = {1: ("computation", 300_000), 2: ("input_wait", MS)}
    found = rows(run_of(tmp_path, meeting(3, ((1, 2),), ((0, 1),), late=late)).frame(charged))
    assert found == pytest.approx(
        {
            (1, 2, "input_wait"): 700_000,
            (0, 2, "input_wait"): 700_000,
            (0, 1, "computation"): 300_000,
            (0, 1, "communication"): 100_000,
        }
    )


@pytest.mark.parametrize("cause", ["input_wait", "computation"])
def test_sixty_four_ranks_wait_for_one_that_few_of_them_meet(tmp_path: Path, cause: str) -> None:
    # Eight hosts of eight: each host meets, then those of one place on every host. Only host 1 meets rank 13 itself.
    hosts = tuple(tuple(range(h, h + 8)) for h in range(0, 64, 8))
    places = tuple(tuple(range(p, 64, 8)) for p in range(8))
    made = meeting(64, hosts, places, late={13: (cause, 2 * MS)})
    found = run_of(tmp_path, made).frame(charged)
    assert set(found["culprit"]) == {13}
    assert by_rank(found, "ns") == pytest.approx({r: 2 * MS for r in range(64) if r != 13})
    assert set(found["category"]) == {cause}


def test_a_chain_that_leads_back_ends_before_who_waits(tmp_path: Path) -> None:
    made = meeting(3, ((0, 1),), ((1, 2),), ((2, 0),), late={0: ("computation", MS)})
    found = rows(run_of(tmp_path, made).frame(charged))
    # Rank 0 waits while ranks 1 and 2 exchange, which began late because of rank 0 itself.
    assert found == pytest.approx(
        {(1, 0, "computation"): MS, (2, 0, "computation"): MS, (2, 1, "communication"): 100_000}
        | {(0, 1, "communication"): 100_000}
    )


def test_who_waits_for_a_late_data_loader_three_stages_back_is_told(tmp_path: Path) -> None:
    us = 1_000
    made = []
    for rank in range(3):
        # Rank 0 fetches for 1 ms. Each stage computes for 1 ms once it has received, and hands on in 0.1 ms.
        at = MS + rank * 1_100 * us
        events: list[Any] = [traces.step(0, 0, 6 * MS), traces.fetch(0, 0 if rank else MS)]
        if rank:
            events.append(traces.sent("recv", rank - 1, 0, at, ranks=(0, 1, 2)))
        events.append(traces.kernel("gemm", at, MS))
        if rank < 2:
            events.append(traces.sent("send", rank + 1, at + MS, 100 * us, ranks=(0, 1, 2)))
        made.append(traces.trace(*events, rank=rank, world_size=3))
    found = rows(run_of(tmp_path, made).frame(charged))
    assert found == pytest.approx(
        {
            (1, 0, "input_wait"): MS,
            (1, 0, "computation"): MS,
            (2, 0, "input_wait"): MS,
            (2, 0, "computation"): MS,
            (2, 1, "computation"): MS,
            (2, 1, "communication"): 100 * us,
        }
    )


def test_where_waiting_cannot_be_told_nobody_is_blamed(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="1 of 3 ranks missing"):
        run_of(tmp_path, late_by(0, 0, 2 * MS)[:2]).frame(blame)


def test_who_computed_ahead_while_waiting_blames_what_had_held_the_other_up(tmp_path: Path) -> None:
    # ms from a step's begin. Both compute for 3, exchange, and meanwhile compute for 2 more, and exchange again. Rank
    # 0's host launches 3 later. To the second exchange it comes last because it computes what the other has done.
    made = []
    for rank, late in ((0, 3 * MS), (1, 0)):
        events: list[Any] = []
        for n in range(4):
            t, c = n * 9 * MS, 10 * n
            first, second = t + late + 3 * MS, max(t + late + 5 * MS, t + 7 * MS)
            events += [
                traces.step(n, t, 9 * MS),
                traces.launched(
                    "forward", t + late - 10_000 + 20_000 * (not late), t + late + 20_000, 3 * MS - 20_000, c + 1
                ),
                traces.launched("backward", t + late + 20_000, first, 2 * MS, c + 2),
                traces.call("cudaLaunchKernelExC", t + late + 30_000, 5_000, c + 3),
                traces.collective(first, t + 7 * MS - first, 1_000, correlation=c + 3),
                traces.call("cudaLaunchKernelExC", t + late + 40_000, 5_000, c + 4),
                traces.collective(second, t + 8_500_000 - second, 1_000, correlation=c + 4),
                traces.call("cudaDeviceSynchronize", t + late + 50_000, 8_900_000 - late, c + 5),
            ]
        made.append(traces.trace(*events, rank=rank))
    run = runs.measured(runs.foreign(tmp_path, *made), *NEEDS)
    charged_to = run.frame(blame)
    mine = charged_to[(charged_to["rank"] == 1) & (charged_to["culprit"] == 0)].set_index("category")["ns"]
    assert mine.idxmax() == "host"
    assert mine["host"] > 0.9 * mine.sum()
