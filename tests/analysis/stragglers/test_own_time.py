"""Each rank's own time, what the slowest one's lead costs, who is late by its collectives, and who is alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.engine import Maybe, by_rank
from dlprof.analysis.engine.ranks import Job, RankAnswer
from dlprof.analysis.machine.samples import sample_means
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.stragglers.late_ranks import (
    Reason,
    late_ranks,
    longer_because,
    members,
    short_collectives,
    straggling,
    workload,
)
from dlprof.analysis.stragglers.own_time import BUSY, LOGGED, NOTABLE_SHARE, TRACED, lead, own_steps, steps_of
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.read.run import Run
from dlprof.result.figures import MANY, Member
from tests.fixtures import runs, traces
from tests.fixtures.exchanges import held_up, late_by
from tests.fixtures.runs import MS, asked


def own(*columns: list[float]) -> pd.DataFrame:
    return pd.DataFrame(dict(enumerate(columns)))


ALIKE = own([10.0, 10.0], [16.0, 16.0], [12.0, 12.0], [15.0, 15.0])


@pytest.mark.parametrize(
    ("times", "late", "expected"),
    [
        # The lead is over the next slowest.
        (own([10.0, 10.0], [16.0, 16.0], [12.0, 12.0]), (),
         {"ranks": (1,), "behind_ns": 4, "saving_ns": 4, "step_ns": 16}),
        # Ranks that are late at once are behind the slowest of the others.
        (ALIKE, (), {"saving_ns": 1}),
        (ALIKE, (1, 3), {"ranks": (1, 3), "behind_ns": 3, "saving_ns": 3}),
        # Rank 1 is 4 late on average: by 8 in every other step. Without 4 it is late by 4 in those.
        (own([10.0] * 40, [18.0, 10.0] * 20), (), {"behind_ns": 4, "saving_ns": 2}),
        # Of 16, 12 and 8 each gets 12; without its lead the slowest would still be at 12.
        (own([16.0, 16.0], [12.0, 12.0], [8.0, 8.0]), (), {"saving_ns": 4, "shared_ns": 4}),
        # Rank 1 is at 14 and 10: beside 12 of the other it ends at 14 every other step, and 10 on average are 12 then.
        (own([20.0] * 4, [14.0, 10.0] * 2), (), {"shared_ns": 20 - (18 + 16) / 2}),
    ],
)  # fmt: skip
def test_the_lead_of_late_ranks(times: pd.DataFrame, late: tuple[int, ...], expected: dict[str, Any]) -> None:
    found = lead(times, late)
    for name, value in expected.items():
        assert getattr(found, name) == (value if name == "ranks" else pytest.approx(value)), name


def test_disturbances_that_last_make_a_short_window_unsure() -> None:
    rng = np.random.default_rng(3)
    lasting = np.repeat(rng.normal(0, 1, 40), 5)
    late = lead(own([10.0] * 200, list(10 + lasting)))
    assert late.window_noise_ns == pytest.approx(1.0, rel=0.3)
    assert late.noise_ns == pytest.approx(1.0 / np.sqrt(40), rel=0.4)


def estimated(path: Path) -> tuple[str, pd.DataFrame]:
    """Return the source of the estimate, and each rank's own time by step."""
    frame = runs.measured(path, own_steps).frame(own_steps)
    (source,) = frame["source"].unique()
    return source, steps_of(frame)


LATE = (MS * 4 // 5, MS, MS * 6 // 5)
ONE = {"torch_threads": 1, "count": 8, "affinity": 8}

# Steps of ranks whose forward passes take so long, and more in the backward pass, where all wait; for what share of all
# steps they were busy → the source of the estimate, and how far rank 1 is behind, ms.
OF_CPU: dict[str, tuple[int, dict[str, Any], tuple[float, float] | None, str, float | None]] = {
    "the step log shows the own time of every step": (3, {}, None, LOGGED, 2),
    "more work in a waiting phase shows only in the trace": (1, {"extra_backward": (MS, MS, MS)}, None, TRACED, 1),
    # Each transfers for 2.2 ms of 6.2; rank 0 stands still for 2.82, though for 3.2 in the traced steps.
    "what one thread exchanges for longer it waits": (
        1,
        {"extra_backward": LATE, **ONE},
        (1 - 2.82 / 6.2, 1 - 2.2 / 6.2),
        BUSY,
        0.62,
    ),
}


@pytest.mark.parametrize("name", OF_CPU)
def test_each_ranks_own_time_on_a_cpu(name: str, tmp_path: Path) -> None:
    forward, more, cores, source, behind = OF_CPU[name]
    folder = runs.cpu_run(tmp_path, MS, forward * MS, **more)
    step = 31 * MS // 5 if "torch_threads" in more else 6 * MS
    for rank, mine in enumerate(cores or ()):
        runs.loading(folder, rank, step=step, wait=0, fetch=MS, cpu=0, n=20, workers=1, cores=mine)
    told, steps = estimated(folder)
    assert told == source
    if behind is not None:
        assert lead(steps).ranks == (1,)
        assert lead(steps).behind_ns == pytest.approx(behind * MS, rel=0.01)
    if source == LOGGED and not cores:
        assert len(steps) > 3
        assert steps.mean().to_dict() == pytest.approx({0: 5 * MS, 1: 7 * MS})


def test_on_a_device_the_mean_is_that_of_all_steady_steps(tmp_path: Path) -> None:
    made = late_by(0, MS)
    source, steps = estimated(runs.foreign(tmp_path, *made))
    assert source == TRACED
    own = runs.measured(tmp_path, own_time).frame(own_time)
    assert steps.mean().to_dict() == pytest.approx(by_rank(own, "own_ns"))


def test_a_rank_that_lost_its_steps_leaves_the_step_log_nothing_to_compare(tmp_path: Path) -> None:
    folder = runs.cpu_run(tmp_path, 1 * MS, 3 * MS)
    log = folder / "ranks/00001/steps.jsonl"
    log.write_text(log.read_text().partition("\n")[0] + "\n")
    assert estimated(folder)[0] == TRACED


def test_ranks_without_a_common_step_abstain(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured):
        estimated(runs.foreign(tmp_path, *late_by(0)))


# -- late ranks


def job(folder: Path, late_ns: int) -> Path:
    """Return traces of two ranks; rank 1 computes for so much longer before each all-reduce, in which rank 0 waits."""
    made = []
    for rank, (computes, reduces) in enumerate(((20 * MS, 5 * MS + late_ns), (20 * MS + late_ns, 5 * MS))):
        events = []
        for n in range(4):
            begin = n * 100 * MS
            events += [
                traces.step(n, begin, 90 * MS),
                traces.kernel("gemm", begin, computes),
                traces.collective(begin + computes, reduces, 1 << 20),
            ]
        made.append(traces.trace(*events, rank=rank, world_size=2))
    return runs.foreign(folder, *made)


@pytest.mark.parametrize("late_ns", [0, 30 * MS])
def test_the_rank_that_computes_longer_is_late_by_that(tmp_path: Path, late_ns: int) -> None:
    run = runs.measured(job(tmp_path, late_ns), late_ranks, straggling)
    found, left = run.frame(late_ranks), run.frame(straggling)
    assert found.share * found.lead.step_ns == pytest.approx(late_ns, rel=0.01, abs=1.0)
    assert (left.share >= NOTABLE_SHARE) == bool(late_ns)
    if late_ns:
        assert (found.lead.ranks, left.cause) == ((1,), "computation")


@pytest.mark.parametrize("ranks", [4, 120])
def test_the_late_rank_is_short_in_all_of_them_whatever_its_clock_shows(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    late = rng.integers(0, 50_000, ranks)
    late[2] = 2 * MS
    begin = rng.integers(0, 100 * MS, ranks) + late
    each = pd.DataFrame({"rank": range(ranks), "start_ns": begin, "end_ns": begin + 3 * MS - late, "wanted": ranks})
    frame = pd.concat([each.assign(instance=n) for n in range(3)])
    steps = Maybe(lambda: pd.DataFrame({"rank": np.repeat(range(ranks), 3)}))
    found = short_collectives(frame, steps).set_index("rank")
    assert found["short"].to_dict() == {r: 3 * (r == 2) for r in range(ranks)}
    assert found["waited_ns"].to_dict() == pytest.approx({r: 2 * MS - ns for r, ns in enumerate(late)})


def test_chance_makes_no_outlier(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    made = late_by(*(int(ns) for ns in rng.integers(0, 500_000, 8)), steps=1)
    with pytest.raises(NotMeasured, match="too few"):
        runs.measured(runs.foreign(tmp_path / "few", *made), short_collectives).frame(short_collectives)
    with pytest.raises(NotMeasured, match="3 or more ranks"):
        runs.measured(runs.foreign(tmp_path / "two", *late_by(0, MS)), short_collectives).frame(short_collectives)
    alike = runs.foreign(tmp_path / "alike", *late_by(*range(0, 800_000, 100_000)))
    assert runs.measured(alike, short_collectives).frame(short_collectives)["short"].sum() == 0


def test_kernels_and_copied_bytes_of_a_step(tmp_path: Path) -> None:
    made = held_up({}, {"computation": MS})
    frame = runs.measured(runs.foreign(tmp_path, *made), workload).frame(workload).set_index("rank")
    assert frame["pieces"].to_dict() == {0: 2, 1: 2}
    assert frame["piece_ns"].to_dict() == {0: 875_000, 1: 1_375_000}
    assert frame["copied_bytes"].to_dict() == {0: 1_000_000, 1: 1_000_000}


def test_a_cpu_has_operators(tmp_path: Path) -> None:
    run = runs.measured(runs.cpu_run(tmp_path, 1 * MS, 3 * MS), workload, sample_means)
    frame = run.frame(workload).set_index("rank")
    assert frame["pieces"].to_dict() == {0: 2, 1: 2}
    assert np.isnan(frame["copied_bytes"]).all()
    assert asked(run, longer_because, 1).words.startswith("as many operators, each 1.67 ×")


def test_waiting_within_an_operator_is_no_work(tmp_path: Path) -> None:
    """A function of the backward pass that waits for an all-to-all is an operator to the profiler."""
    made = []
    for rank, alone in enumerate((3 * MS, MS)):
        events: list[Any] = []
        for n in range(3):
            t = 10 * n * MS
            events += [traces.step(n, t, 10 * MS), traces.op("aten::mm", t, alone)]
            events += [traces.op("ToOwnersBackward", t + alone, 4 * MS - alone)]
            events += [traces.annotation("gloo:all_to_all", t + alone, 4 * MS - alone, tid=2)]
        made.append(traces.trace(*events, rank=rank, backend="gloo", device=""))
    frame = runs.measured(runs.foreign(tmp_path, *made), workload).frame(workload).set_index("rank")
    assert (frame["pieces"] * frame["piece_ns"]).to_dict() == {0: 3 * MS, 1: MS}


def test_ranks_alike_give_no_reason(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, traces.training(), traces.training(rank=1)), workload, sample_means)
    assert asked(run, longer_because, 0) == Reason()


# -- groups of like ranks, and the ranks that stand out

RANKS = 256


def known(frame: pd.DataFrame | None) -> Maybe[pd.DataFrame]:
    """Return a measure that is there, or is not."""

    def ask() -> pd.DataFrame:
        if frame is None:
            raise NotMeasured("no pipeline")
        return frame

    return Maybe(ask)


def of(
    computation: Mapping[int, float], stages: int = 1, waits: Mapping[int, float] | None = None, ranks: int = RANKS
) -> dict[int, Member]:
    """Return the members of a job whose ranks compute 60 ms but for these, wait 30 ms but for these."""
    jitter = np.random.default_rng(3).normal(1.0, 0.002, ranks)
    mine = np.array([computation.get(r, 60.0) for r in range(ranks)]) * jitter * MS
    wait = np.array([(waits or {}).get(r, 30.0) for r in range(ranks)]) * MS
    parts = {"computation": mine, "communication": wait + 2 * MS}
    breakdown = pd.concat([pd.DataFrame({"rank": range(ranks), "category": c, "ns": ns}) for c, ns in parts.items()])
    own = pd.DataFrame({"rank": range(ranks), "wait_ns": wait})
    rows = [(r, f"{r // stages}", str(r % stages)) for r in range(ranks)]
    pipelines = pd.DataFrame(rows, columns=["rank", "ranks", "stages"]) if stages > 1 else None
    facts = {r: RankAnswer({}, {"host": f"node-{r // 8}"}, {}, ()) for r in range(ranks)}
    found = members.function(breakdown, own, known(pipelines), Job(Run(Path(), ()), facts))
    return {m.rank: m for m in found}


def test_like_ranks_are_one_group_and_the_slow_one_stands_out() -> None:
    found = of({77: 90.0}, waits={77: 0.0})
    assert list(found) == list(range(RANKS))
    assert {r for r, m in found.items() if m.category} == {77}
    slow = found[77]
    assert (slow.host, slow.group, slow.category) == ("node-9", "all ranks", "computation")
    assert slow.ns == pytest.approx(90 * MS, rel=0.02)
    assert slow.usual_ns == pytest.approx(60 * MS, rel=0.01)


def test_waiting_for_others_makes_no_rank_unlike_them() -> None:
    assert not any(m.category for m in of({}, waits={5: 0.0, 6: 80.0}).values())


def test_stages_of_pipelines_are_compared_with_their_like() -> None:
    longer = {r: 90.0 for r in range(RANKS) if r % 4 == 3}
    found = of(longer | {42: 85.0}, stages=4)
    assert Counter(m.group for m in found.values()) == {f"stage {n}": RANKS // 4 for n in range(4)}
    assert {r for r, m in found.items() if m.category} == {42}


def test_many_that_differ_alike_are_a_group_of_their_own() -> None:
    found = of(dict.fromkeys(range(100), 80.0))
    assert not any(m.category for m in found.values())
    assert Counter(m.group for m in found.values()) == {"all ranks": 156, "all ranks, more computation": 100}


def test_few_ranks_are_shown_one_by_one() -> None:
    with pytest.raises(DoesNotApply):
        of({}, ranks=MANY - 1)
