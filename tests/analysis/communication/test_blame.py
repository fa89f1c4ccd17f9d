"""Blame: known culprits and causes in made runs of many ranks, on skewed clocks and through chains of waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.communication.blame import accounts, attributed_waits, blame
from dlprof.analysis.communication.collectives import collectives, waits
from dlprof.analysis.engine import Measured, by_rank
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import own_time
from tests.fixtures import runs, traces
from tests.fixtures.exchanges import held_up, late_by, meeting
from tests.fixtures.runs import MS, asked

NEEDS = (accounts, blame, attributed_waits, collectives, own_time, waits)
US = 1_000


def run_of(folder: Path, made: list[dict[str, Any]]) -> Measured:
    return runs.measured(runs.foreign(folder, *made), *NEEDS)


def rows(frame: pd.DataFrame) -> dict[tuple[int, int, str], float]:
    return {(int(r), int(c), str(k)): n for r, c, k, n in frame[["rank", "culprit", "category", "ns"]].to_numpy()}


# All ranks compute last: a late rank does that while the others wait for it, whatever held it up before.
@pytest.mark.parametrize(
    ("more", "blamed"),
    [
        *(
            (({}, {cause: MS}, {}), {(0, 1, cause): MS, (2, 1, cause): MS})
            for cause in ("input_wait", "computation", "host", "copy")
        ),
        # Several causes share the blame, and what the late rank does less takes none.
        (
            ({"copy": 400_000}, {"input_wait": 600_000, "host": 200_000}),
            {(0, 1, "input_wait"): 300_000, (0, 1, "host"): 100_000},
        ),
    ],
)
def test_the_cause_is_named_though_the_late_rank_computes_while_the_others_wait(
    tmp_path: Path, more: Any, blamed: dict[tuple[int, int, str], float]
) -> None:
    assert rows(run_of(tmp_path, held_up(*more)).frame(blame)) == pytest.approx(blamed)


def test_many_ranks_on_hosts_whose_clocks_are_apart_blame_the_same_one(tmp_path: Path) -> None:
    ranks = 12
    rng = np.random.default_rng(ranks)
    culprit = int(rng.integers(ranks))
    more = [{"computation": int(ns)} for ns in rng.integers(0, 100_000, ranks)]
    more[culprit] = {"input_wait": 2 * MS}
    per_host = rng.integers(-50 * MS, 50 * MS, ranks // 4)
    clocks = [100 * MS + int(per_host[r // 4]) for r in range(ranks)]
    run = run_of(tmp_path, held_up(*more, clocks=clocks, hosts=[f"node-{r // 4}" for r in range(ranks)]))
    expected = {r: 3 * (2 * MS - more[r]["computation"]) for r in range(ranks) if r != culprit}
    assert by_rank(run.frame(waits), "wait_ns") == pytest.approx(expected | {culprit: 0}, abs=3)
    frame = run.frame(attributed_waits)
    assert set(frame["culprit"]) == {culprit}
    assert by_rank(frame, "ns") == pytest.approx(expected, abs=3)
    # What the trace does not tell is the clocks' rounding, and no more.
    told = frame.groupby("category")["ns"].sum()
    assert told["input_wait"] == pytest.approx(sum(expected.values()), abs=10 * ranks)


def test_it_adds_up_to_the_waiting_however_many_reasons_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every rank is the last in one step: each waits for all the others, for a little.
    most, ranks = 3, 6
    monkeypatch.setattr("dlprof.analysis.communication.blame.MOST_REASONS", most)
    more = [{} if r else {"host": 100_000} for r in range(ranks)]
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
    assert (frame.groupby("rank").size() == most + 1).all()


def logged(folder: Path, made: list[dict[str, Any]], logs: list[Any], *needs: Any, **more: Any) -> Measured:
    facts = {"device": {"type": "cuda"}, "host": "node-1"}
    ranks = ((m, log, facts) for m, log in zip(made, logs, strict=True))
    return runs.measured(runs.recorded(folder / "run", *ranks, **more), *needs, *NEEDS)


def test_stalls_that_no_traced_step_saw_are_blamed_as_all_steps_tell(tmp_path: Path) -> None:
    # Rank 1 saves for 10 ms in every tenth step, none of them traced; in those it also copies 1 ms longer.
    logs = [[runs.light(n, 4 * MS + 10 * MS * (n % 10 == 0)) for n in range(43)] for _ in range(3)]
    saved = [runs.stall("checkpoint", n, 10 * MS) for n in range(0, 43, 10)]
    run = logged(tmp_path, held_up({}, {"copy": MS}, {}), logs, stalls=[[], saved, []])
    found, wait = rows(run.frame(blame)), run.frame(own_time).set_index("rank")["wait_ns"]
    steady = 40
    assert found[0, 1, "checkpoint"] == pytest.approx(min(4 * 10 * MS / steady, wait[0]))
    assert found[0, 1, "checkpoint"] + found.get((0, 1, "copy"), 0.0) == pytest.approx(wait[0])


def test_nobody_is_charged_more_than_the_late_rank_spent(tmp_path: Path) -> None:
    # The traced steps wait 1 ms longer for data on rank 1; the mean steady step waits for no more than 0.6 ms there.
    logs = [[runs.light(n, 4 * MS, fetch_ns=600_000 * r) for n in range(43)] for r in range(2)]
    run = logged(tmp_path, held_up({}, {"input_wait": MS}), logs, breakdown)
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


def pairs() -> list[dict[str, Any]]:
    """Make two groups of two ranks, of which the second is late."""
    made = []
    for rank, late in enumerate((0, 300_000, 0, 500_000)):
        pair = (0, 1) if rank < 2 else (2, 3)
        events = [traces.step(0, 0, 3 * MS), traces.kernel("gemm", 0, MS + late)]
        events.append(traces.collective(MS + late, MS - late, 1_000, group=f"{7 + rank // 2}", ranks=pair))
        made.append(traces.trace(*events, rank=rank, world_size=4))
    return made


def stages() -> list[dict[str, Any]]:
    """Make three stages: rank 0 fetches for 1 ms; each computes for 1 ms once it has received, and hands on in 0.1."""
    made = []
    for rank in range(3):
        at = MS + rank * 1_100 * US
        events: list[Any] = [traces.step(0, 0, 6 * MS), traces.fetch(0, 0 if rank else MS)]
        events += [traces.sent("recv", rank - 1, 0, at, ranks=(0, 1, 2))] if rank else []
        events.append(traces.kernel("gemm", at, MS))
        events += [traces.sent("send", rank + 1, at + MS, 100 * US, ranks=(0, 1, 2))] if rank < 2 else []
        made.append(traces.trace(*events, rank=rank, world_size=3))
    return made


IN, COMPUTED, SENT = "input_wait", "computation", "communication"
CHAINS: dict[str, tuple[list[dict[str, Any]], dict[tuple[int, int, str], float]]] = {
    "groups blame within themselves": (pairs(), {(0, 1, COMPUTED): 300 * US, (2, 3, COMPUTED): 500 * US}),
    # Rank 1 comes late to rank 0, for it had waited for rank 2's data; rank 0 waits for their transfer as well.
    "handed on to where it begins": (
        meeting(3, ((1, 2),), ((0, 1),), late={2: (IN, MS)}),
        {(1, 2, IN): MS, (0, 2, IN): MS, (0, 1, SENT): 100 * US},
    ),
    "two causes in a chain": (
        meeting(3, ((1, 2),), ((0, 1),), late={1: (COMPUTED, 300 * US), 2: (IN, MS)}),
        {(1, 2, IN): 700 * US, (0, 2, IN): 700 * US, (0, 1, COMPUTED): 300 * US, (0, 1, SENT): 100 * US},
    ),
    # Rank 0 waits while ranks 1 and 2 exchange, which began late because of rank 0 itself.
    "a chain that leads back": (
        meeting(3, ((0, 1),), ((1, 2),), ((2, 0),), late={0: (COMPUTED, MS)}),
        {(1, 0, COMPUTED): MS, (2, 0, COMPUTED): MS, (2, 1, SENT): 100 * US, (0, 1, SENT): 100 * US},
    ),
    "a data loader stages back": (
        stages(),
        {
            **{(rank, 0, cause): MS for rank in (1, 2) for cause in (IN, COMPUTED)},
            (2, 1, COMPUTED): MS,
            (2, 1, SENT): 100 * US,
        },
    ),
}


@pytest.mark.parametrize(("made", "expected"), CHAINS.values(), ids=CHAINS)
def test_the_blame_is_handed_on_to_where_the_chain_begins(made: Any, expected: Any, tmp_path: Path) -> None:
    assert rows(run_of(tmp_path, made).frame(attributed_waits)) == pytest.approx(expected)


def test_sixteen_ranks_wait_for_one_that_few_of_them_meet(tmp_path: Path) -> None:
    # Four hosts of four: each host meets, then those of one place on every host. Only host 1 meets rank 6 itself.
    hosts = tuple(tuple(range(h, h + 4)) for h in range(0, 16, 4))
    places = tuple(tuple(range(p, 16, 4)) for p in range(4))
    found = run_of(tmp_path, meeting(16, hosts, places, late={6: (IN, 2 * MS)})).frame(attributed_waits)
    assert by_rank(found, "ns") == pytest.approx({r: 2 * MS for r in range(16) if r != 6})
    assert (set(found["culprit"]), set(found["category"])) == ({6}, {IN})


def test_who_computed_ahead_while_waiting_blames_what_had_held_the_other_up(tmp_path: Path) -> None:
    # ms from a step's begin. Both compute for 3, exchange, and meanwhile compute for 2 more, and exchange again. Rank
    # 0's host launches 3 later. To the second exchange it comes last because it computes what the other has done.
    made = []
    for rank, late in ((0, 3 * MS), (1, 0)):
        events: list[Any] = []
        for n in range(4):
            t, c = n * 9 * MS, 10 * n
            at, first, second = t + late, t + late + 3 * MS, max(t + late + 5 * MS, t + 7 * MS)
            begins = at - 10_000 + 20_000 * (not late)
            events += [
                traces.step(n, t, 9 * MS),
                traces.launched("forward", begins, at + 20_000, 3 * MS - 20_000, c + 1),
                traces.launched("backward", at + 20_000, first, 2 * MS, c + 2),
                traces.call("cudaLaunchKernelExC", at + 30_000, 5_000, c + 3),
                traces.collective(first, t + 7 * MS - first, 1_000, correlation=c + 3),
                traces.call("cudaLaunchKernelExC", at + 40_000, 5_000, c + 4),
                traces.collective(second, t + 8_500_000 - second, 1_000, correlation=c + 4),
                traces.call("cudaDeviceSynchronize", at + 50_000, 8_900_000 - late, c + 5),
            ]
        made.append(traces.trace(*events, rank=rank))
    frame = run_of(tmp_path, made).frame(blame)
    mine = frame[(frame["rank"] == 1) & (frame["culprit"] == 0)].set_index("category")["ns"]
    assert mine["host"] > 0.9 * mine.sum()
