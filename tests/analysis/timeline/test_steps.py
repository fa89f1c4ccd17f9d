"""Which steps are steady and how long they are, what stalls and periodic work cost, and traced steps on a device.

Work and time of real asynchronous jobs are those that an independent program made of them. These traces were recorded
by others and are not part of this project: without them their tests skip.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Measured, RankData
from dlprof.analysis.step.breakdown import breakdown, part, part_noise
from dlprof.analysis.step.savings import spread
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.stalls import compilations, periodic, stall_means, stalled_steps
from dlprof.analysis.timeline.steady import (
    STRETCHES,
    error_in_turn,
    in_turn,
    light_steps,
    standard_error,
    steady_steps,
    stretch_means,
)
from dlprof.analysis.timeline.steps import (
    NO_STEP,
    main_stream,
    mean_step_ns,
    of_step,
    phases_of_step,
    step_means,
    step_series,
    timing,
    trace_window,
)
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.places import TRACES
from tests.fixtures.runs import MS, asked, light, stall

GPU = {"device": {"type": "cuda", "name": "NVIDIA A100-SXM4-80GB", "index": 0}}
NEEDS = (breakdown, periodic, spread, stall_means, stalled_steps, step_means, step_series)


def measured(
    folder: Path, steps: Sequence[Any], made: Any = None, stalls: list[Any] | None = None, **facts: Any
) -> Measured:
    """Measure a rank of these steps; `made`: its trace."""
    resumed = {"resumed_ns": facts.pop("resumed_ns")} if "resumed_ns" in facts else {}
    told = None if stalls is None else [stalls]
    path = runs.recorded(folder / "run", (made, steps, {**runs.CPU, **facts}), stalls=told, **resumed)
    return runs.measured(path, *NEEDS)


def means(folder: Path, steps: Sequence[Any], made: Any = None, **more: Any) -> dict[str, Any]:
    return {str(k): v for k, v in measured(folder, steps, made, **more).frame(step_means).iloc[0].items()}


def alike(many: int, length: int = 10 * MS, **more: Any) -> list[Any]:
    return [light(n, length, **more) for n in range(many)]


def marked(*at: int, length: int = MS, last: int = -1) -> dict[str, Any]:
    """Make a trace of steps that begin at these times, and of one operator."""
    steps = (traces.step(n, t, length if n != last else length + 300 * MS) for n, t in enumerate(at))
    return traces.trace(*steps, traces.op("aten::mm", 0, 10), device="")


ODD = [light(4, 500 * MS, first=1), light(5, 90 * MS, kind="validation"), light(6, 70 * MS, profiled=1)]


@pytest.mark.parametrize(
    ("steps", "made", "expected"),
    [
        # Warm-up, an epoch's first, validation and profiled steps are not steady.
        ([*alike(4, 50 * MS), *ODD, *(light(n, 10 * MS) for n in range(7, 40))], None, (33, 10 * MS)),
        # Where every step begins an epoch, its steps are like that; where every other one does, they are not.
        (alike(40, first=1), None, (37, 10 * MS)),
        ([light(n, (10 + 10 * (n % 2)) * MS, first=n % 2) for n in range(80)], None, (37, 10 * MS)),
        # A stall every k steps is part of the mean.
        ([light(n, 110 * MS if n % 10 == 9 else 10 * MS) for n in range(103)], None, (100, 20 * MS)),
        # Of a job that only infers these are its steps.
        (alike(30, kind="validation"), None, (27, 10 * MS)),
        # A warm-up of any length leaves two thirds of the run, and one of six steps the others.
        ([light(n, (10 + 90 * (n < 6)) * MS) for n in range(40)], None, (34, 10 * MS)),
        ([light(n, (30 - n) * MS) for n in range(30)], None, (20, 10.5 * MS)),
        # A few light steps leave the mean to the trace; a traced step that holds an epoch's end is left out.
        (alike(4, 5 * MS), marked(0, MS, 2 * MS), ("trace", MS, 3)),
        ([light(n, 5 * MS, first=int(n == 2)) for n in range(30)], marked(0, MS, 2 * MS, 3 * MS), 3),
    ],
)
def test_which_steps_count_and_their_mean(steps: Any, made: Any, expected: Any, tmp_path: Path) -> None:
    found = means(tmp_path, steps, made)
    if made is None:
        assert (found["steps"], found["step_ns"]) == expected
    elif isinstance(expected, tuple):
        assert (found["source"], found["step_ns"], found["traced_steps"]) == expected
    else:
        assert found["traced_steps"] == expected


@pytest.mark.parametrize("after_ms", [3_900, 4_400])
def test_a_step_in_which_the_job_was_suspended_is_not_steady(after_ms: int, tmp_path: Path) -> None:
    """When it went on is known from beside it, give or take; a step that ended long before is steady."""
    steps = [light(n, 4_000 * MS if n == 20 else 10 * MS) for n in range(23)]
    steps += [light(n, 10 * MS, traces.BASE_NS + (n + 4) * 1_000 * MS) for n in range(23, 43)]
    run = measured(tmp_path, steps, resumed_ns=[traces.BASE_NS + (20_000 + after_ms) * MS])
    assert run.frame(step_means)["step_ns"][0] == 10 * MS
    series = run.frame(step_series)
    assert series.loc[series["kind"] == "suspended", "step"].to_list() == [20]


# It stood for 300 ms: of steps shorter than anybody knows when the job went on the longest is left out.
STOOD = [n * MS + (n > 2) * 300 * MS for n in range(6)]


@pytest.mark.parametrize(
    ("made", "resumed", "expected"),
    [
        (marked(*(n * 2_000 * MS for n in range(4))), 4_000 * MS, (3, MS)),
        (marked(*STOOD[:5], last=2), STOOD[3], (4, MS)),
        (
            traces.trace(
                *(one for at in STOOD for one in (traces.fetch(at, 100), traces.op("MulBackward0", at + 200, 10)))
            ),
            STOOD[3],
            (4, MS),
        ),
    ],
)
def test_a_traced_step_in_which_the_job_was_suspended_is_left_out(
    made: Any, resumed: int, expected: Any, tmp_path: Path
) -> None:
    found = means(tmp_path, [], made, resumed_ns=[traces.BASE_NS + resumed])
    assert (found["traced_steps"], found["step_ns"]) == expected


@pytest.mark.parametrize(("fetches", "micro"), [(1, 1.0), (4, 4.0)])
def test_phases_share_the_step_and_the_rest_is_what_is_left(fetches: int, micro: float, tmp_path: Path) -> None:
    spent = {"forward_ns": 2 * MS, "backward_ns": 4 * MS, "optimizer_ns": MS, "fetch_ns": MS}
    steps = alike(30, **spent, optimizer_steps=1, fetches=fetches, backwards=fetches)
    run = runs.measured(runs.recorded(tmp_path / "run", (None, steps, runs.CPU)), phases_of_step)
    frame = run.frame(phases_of_step).set_index("phase")
    expected = {"fetch": 1, "forward": 2, "backward": 4, "optimizer": 1, "rest": 2}
    assert (frame["ns"] / MS).to_dict() == pytest.approx(expected)
    assert (frame["share"] * 10).to_dict() == pytest.approx(expected)
    assert set(frame["micro_batches"]) == {micro}


def test_unmarked_and_overlapping_steps(tmp_path: Path) -> None:
    # They begin at the loader, or at the next one's start; where nothing marks a step the trace stands for one.
    trained = [[traces.fetch(n * MS, 100), traces.op("MulBackward0", n * MS + 200, 10)] for n in range(4)]
    fetched = traces.trace(*itertools.chain(*trained), traces.op("x", 3 * MS, 10))
    found = runs.rank_of(tmp_path / "a", fetched).once(timing)
    assert (found.steps, found.step_ns, found.unit) == (3, MS, "step")
    rank = runs.rank_of(tmp_path / "b", traces.trace(traces.step(1, 0, 2 * MS), traces.step(2, MS, MS)))
    assert (rank.once(timing).windows - traces.BASE_NS).tolist() == [[0, MS], [MS, 2 * MS]]
    none = traces.trace(traces.op("aten::mm", 0, 10), traces.kernel("gemm", 5, 3 * MS - 5))
    run = runs.measured(runs.foreign(tmp_path / "c", none), step_means)
    assert (run.frame(of_step), run.frame(mean_step_ns)) == ("of the traced time", 3 * MS)
    with pytest.raises(NotMeasured, match="no complete training step"):
        measured(tmp_path / "d", []).frame(step_means)


COLD = "steps at the start that took longer than those after"


@pytest.mark.parametrize(
    ("first", "length", "left"),
    [
        ([traces.op("aten::convolution", 0, 50 * MS)], 10 * MS, (f"2 {COLD}",)),
        # A job may wait for data in any step, and so does a script that calls nothing.
        ([traces.fetch(0, 40 * MS), traces.op("aten::mm", 40 * MS, 10 * MS)], 170 * MS / 9, ()),
        ([traces.op("aten::mm", 40 * MS, 10 * MS)], 170 * MS / 9, ()),
    ],
    ids=["cold", "waits for data", "silent"],
)
def test_first_steps_of_a_trace_that_do_what_is_done_once_are_left_out(
    first: list[Any], length: float, left: tuple[str, ...], tmp_path: Path
) -> None:
    # Two steps of 50 ms before seven of 10.
    events: list[Any] = []
    for n in range(9):
        start = 50 * MS * n if n < 2 else 100 * MS + 10 * MS * (n - 2)
        events.append(traces.step(n, start, 50 * MS if n < 2 else 10 * MS))
        made = first if n < 2 else [traces.op("aten::mm", 0, 10 * MS)]
        events += [{**one, "ts": one["ts"] + start / 1000} for one in made]
    found = runs.rank_of(tmp_path, traces.trace(*events, device="")).once(timing)
    assert found.step_ns == pytest.approx(length)
    assert found.left == left


def test_long_series_are_thinned_at_the_same_steps_on_every_rank(tmp_path: Path) -> None:
    ranks = [(None, [light(n, MS) for n in range(first, 5_000)], runs.CPU) for first in (0, 1)]
    frame = runs.measured(runs.recorded(tmp_path / "run", *ranks), step_series).frame(step_series)
    series = [set(g["step"]) for _, g in frame.groupby("rank")]
    assert len(series[0]) < 2_000
    assert series[0] - series[1] == {0}


def test_steps_on_the_devices_clock_are_as_long_as_it_says(tmp_path: Path) -> None:
    steps = [light(n, MS, device_step_ns=-1 if n == 30 else 10 * MS) for n in range(40)]
    rank = RankData(open_run(runs.recorded(tmp_path / "run", (None, steps, GPU))).ranks[0])
    assert set(rank.once(steady_steps)["length_ns"]) == {10 * MS}
    assert rank.once(light_steps).loc[~rank.once(light_steps)["steady"], "step"].tolist() == [0, 1, 2, 30]


@pytest.mark.parametrize(("last", "traced"), [(11, 0), (12, 1)])
def test_a_trace_that_ends_before_its_first_step_is_no_trace(last: int, traced: int, tmp_path: Path) -> None:
    window = {"state": "partial", "first_step": 12, "last_step": last}
    made = traces.trace(traces.step(12, 0, MS), traces.op("aten::mm", 0, MS // 2), world_size=1)
    path = runs.recorded(
        tmp_path / "run", (made, [light(n, 50 * MS) for n in range(13)], {**runs.CPU, "window": window})
    )
    run = runs.measured(path, step_means)
    assert run.frame(step_means)["traced_steps"].tolist() == [traced]


def test_the_error_of_a_mean_of_few_is_wide() -> None:
    assert stretch_means(np.arange(2.0 * STRETCHES)).tolist() == [2 * n + 0.5 for n in range(STRETCHES)]
    rng = np.random.default_rng(1)
    for n in (2, 3, 5, 12, 40):
        draws = rng.normal(10.0, 1.0, (2_000, n))
        missed = np.mean([abs(d.mean() - 10.0) > 1.96 * standard_error(d) for d in draws])
        assert missed == pytest.approx(0.05, abs=0.015), n
    assert standard_error(np.array([3.0])) == 0.0


TEN = [2] * 9 + [982]
# Lengths of a host's steps (ms) without the device's clock, those that begin an epoch, which are steady, their mean.
HOSTS: dict[str, tuple[list[int], tuple[int, ...], Callable[[Any], bool], float]] = {
    # The device takes 100 ms a step. After an epoch's end the host runs ahead of it by five steps, and then waits.
    "gets its lead again": (
        [100] * 30 + [800] + [1] * 5 + [105] + [100] * 20,
        (30,),
        lambda s: not s[31:36].any(),
        100,
    ),
    "a few between two stops": (
        [100] * 20 + [300, 900, 2, 300] + [100] * 20,
        (20, 23),
        lambda s: not s[21:23].any(),
        100,
    ),
    "all stretches are short": ([500, 100, 100, 100] * 6, tuple(range(0, 24, 4)), lambda s: s.sum() >= 12, 100),
    # Every tenth step the host waits for all that it has launched: from the first wait of each stretch to its last.
    "waits now and then": (TEN * 3 + [5, *TEN[6:]] + TEN * 2 + TEN[:4], (30,), lambda s: s.sum() == 20 + 20, 100),
    "pauses that are a small part": (([100] * 20 + [400]) * 2 + [100] * 20, (), lambda s: s.sum() == 59, 6_500 / 59),
}


@pytest.mark.parametrize(("lengths", "stopped", "steady", "mean"), HOSTS.values(), ids=HOSTS)
def test_steps_in_which_a_hosts_lead_changes_do_not_count(
    lengths: list[int], stopped: tuple[int, ...], steady: Callable[[Any], bool], mean: float, tmp_path: Path
) -> None:
    steps = [light(n, ms * MS, first=int(n in stopped)) for n, ms in enumerate(lengths)]
    frame: pd.DataFrame = RankData(open_run(runs.recorded(tmp_path, (None, steps, GPU))).ranks[0]).once(light_steps)
    assert steady(frame["steady"])
    assert frame["length_ns"][frame["steady"]].mean() == pytest.approx(mean * MS, rel=0.01)
    # What the host gained, the device had still to do: the whole is as long as it was.
    assert frame["length_ns"].sum() == pytest.approx(frame["dur_ns"].sum(), rel=0.2)


STOCK = [8, 7, 6, 5, 4, 3, 2, 1]
TWICE = (STOCK + [0] * 8 + STOCK + [0] * 22, [0] * 8 + [30] * 8 + [0] * 8 + [30] * 22)


@pytest.mark.parametrize(
    ("ready", "waits", "more", "steady"),
    [
        # Eight batches were ready when training began; the loader makes one in 40 ms.
        (STOCK + [0] * 22, [0] * 8 + [30] * 22, {}, "." * 8 + "s" * 22),
        # While step 15 prepares the profiler, it makes eight more.
        (*TWICE, {"profiled": 15}, "." * 8 + "s" * 7 + "." * 9 + "s" * 22),
        # Those that are ready when an epoch begins are there in every epoch.
        (*TWICE, {"first": 15}, "." * 8 + "s" * 7 + "." + "s" * 30),
        # A loader that keeps up has its batches ready, until its data end.
        ([8] * 22 + STOCK, [0] * 30, {}, "...." + "s" * 26),
        # Eight workers that are done at once: what is ready comes in waves, and each is part of what a step is.
        (list(range(16, 8, -1)) + [0, *STOCK[1:]] * 4, [0] * 8 + ([240] + [0] * 7) * 4, {}, "." * 8 + "s" * 32),
    ],
)
def test_steps_that_use_up_what_a_slow_loader_made_ahead_do_not_count(
    tmp_path: Path, ready: list[int], waits: list[int], more: dict[str, int], steady: str
) -> None:
    first = more.get("first", -1)
    steps = [
        light(n, (10 + w) * MS, fetch_ns=w * MS, profiled=int(n == more.get("profiled")), first=int(n in (0, first)))
        for n, w in enumerate(waits)
    ]
    path = runs.recorded(tmp_path / "run", (None, steps, runs.CPU))
    rows = [
        {"kind": "batch", "start_ns": s["start_ns"], "dur_ns": s["fetch_ns"], "count": 1, "step": s["step"]}
        | {"loader": 0, "empty": int(not r), "ready": r, "outstanding": 8}
        for s, r in zip(steps, ready, strict=True)
    ]
    (path / "ranks/00000/loading.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    frame = RankData(open_run(path).ranks[0]).once(light_steps)
    assert "".join("s" if one else "." for one in frame["steady"]) == steady


GC, SAVE = "garbage_collection", "checkpoint"


def adds_up(run: Measured) -> bool:
    return bool(run.frame(breakdown)["ns"].sum() == pytest.approx(run.frame(step_means)["step_ns"][0], rel=1e-12))


def test_a_stall_counts_in_the_steady_step_in_which_it_begins(tmp_path: Path) -> None:
    stalls = [
        stall(GC, 0, 9 * MS),  # warm-up
        stall(GC, 5, 2 * MS),
        stall(GC, 5, 1 * MS, 4 * MS),
        stall(GC, 6, 4 * MS, 9 * MS),  # 1 ms of it in its step
        stall(GC, 7, 4 * MS, 10 * MS),  # in no step: they end after 10 ms
        stall(SAVE, 8, 8 * MS, path="/d/m.pt"),
        stall("power_failure", 9, 8 * MS),  # of a later dlprof
    ]
    run = measured(tmp_path, alike(30), stalls=stalls)
    rows = run.frame(stall_means).set_index("kind").to_dict("index")
    pauses, saves = rows[GC], rows[SAVE]
    assert pauses["mean_ns"] == pytest.approx(4 * MS / 27)
    assert (pauses["stalls"], pauses["longest_ns"], pauses["every"]) == (3, 2 * MS, 27 / 2)
    assert (saves["mean_ns"], saves["stalls"], saves["every"]) == (pytest.approx(8 * MS / 27), 1, 27)
    assert saves["noise_ns"] > 0
    steps = run.frame(stalled_steps)[["kind", "step", "ns", "generation", "path"]].to_numpy().tolist()
    assert steps == [[SAVE, 8, 8 * MS, -1, "/d/m.pt"], [GC, 5, 3 * MS, 2, ""], [GC, 6, 1 * MS, 2, ""]]


def test_a_row_that_stands_for_many_counts_for_all_of_them(tmp_path: Path) -> None:
    run = measured(tmp_path, alike(30), stalls=[stall(GC, 5, 3 * MS), stall(GC, 6, 40 * MS) | {"count": 20}])
    pauses = run.frame(stall_means).set_index("kind").loc[GC]
    # It is longer than the step in which the first of them fell.
    assert pauses["mean_ns"] == pytest.approx(43 * MS / 27)
    assert (pauses["stalls"], pauses["longest_ns"], pauses["every"]) == (21, 3 * MS, 27 / 21)


def test_what_stalled_steps_take_longer_besides_is_their_difference_to_the_others(tmp_path: Path) -> None:
    steps = [light(n, 10 * MS + (n in (10, 20)) * 8 * MS) for n in range(30)]
    stalls = [stall(SAVE, n, 5 * MS) for n in (10, 20)] + [stall(GC, n, MS) for n in range(4, 30, 2)]
    rows = measured(tmp_path, steps, stalls=stalls).frame(stall_means).set_index("kind")
    # Two of 27 steps are 3 ms longer than by what is known.
    assert rows["longer_ns"][SAVE] == pytest.approx(2 * 3 * MS / 27)
    assert rows["longer_noise_ns"][SAVE] > 0
    # Hardly a step has neither a pause nor one before it, and none compiles.
    assert rows["longer_ns"][[GC, "compilation"]].isna().all()


def test_no_stall_is_zero_no_record_abstains_and_a_schedule_is_as_sure_as_its_length(tmp_path: Path) -> None:
    assert measured(tmp_path / "none", alike(30), stalls=[]).frame(stall_means)["mean_ns"].to_list() == [0.0, 0.0, 0.0]
    with pytest.raises(NotMeasured, match="no record of garbage collection"):
        measured(tmp_path / "old", alike(30)).frame(stall_means)
    for name, of, least, most in (("a", lambda _: 5 * MS, 0, 0), ("b", lambda n: n * MS // 4, 0.1 * MS, MS)):
        saves = [stall(SAVE, n, of(n)) for n in (5, 15, 25)]
        assert least <= measured(tmp_path / name, alike(30), stalls=saves).frame(stall_means)["noise_ns"][0] <= most


def test_compilations_are_told_by_function_and_reason(tmp_path: Path) -> None:
    first = stall("compilation", 0, 50 * MS, path="m.py:3 forward", reason=None)
    more = [first | stall("compilation", n, 4 * MS, reason=f"0/{n}: expected 7, actual {n}") for n in (0, 10, 20)]
    stalls = [[first, *(one | {"path": "m.py:3 forward"} for one in more), stall(SAVE, 12, 4 * MS)]]
    path = runs.recorded(tmp_path / "run", (None, alike(30, 60 * MS), runs.CPU), stalls=stalls)
    frame = runs.measured(path, compilations).frame(compilations)
    assert frame.drop(columns="rank").to_numpy().tolist() == [
        ["m.py:3 forward", "", 1, 50 * MS, 0, 0],
        ["m.py:3 forward", "expected 7, actual 0", 3, 12 * MS, 2, 8 * MS],
    ]


def test_without_a_trace_the_stalls_of_a_cpu_run_are_known(tmp_path: Path) -> None:
    stalls = [stall(SAVE, n, 2 * MS) for n in range(30)]
    stalls += [stall(GC, n, MS, 3 * MS, phase="fetch") for n in range(30)]
    run = measured(tmp_path, alike(30, fetch_ns=3 * MS), stalls=stalls)
    parts = {SAVE: 2 * MS, GC: MS, "input_wait": 2 * MS, "other": 5 * MS}
    assert {name: asked(run, part, name)[0] for name in parts} == pytest.approx(parts)
    assert adds_up(run)


@pytest.mark.parametrize("save", [0, 20 * MS], ids=["untraced", "traced"])
def test_on_the_cpu_stalls_leave_computation_as_it_is(tmp_path: Path, save: int) -> None:
    # The traced step: 6 ms forward, all operators; 1 ms operators and 1 ms Python in the rest; a save in one case only.
    at = 1_000 * MS * 10
    made = traces.trace(
        traces.step(10, at, 8 * MS + save),
        traces.annotation("dlprof::forward", at, 6 * MS),
        traces.op("aten::mm", at, 6 * MS),
        traces.op("aten::sum", at + 6 * MS, MS),
        device="",
        backend="",
        world_size=1,
    )
    # Untraced: 6 ms forward, 2 ms saving, 2 ms else.
    stalls = [stall(SAVE, n, save if n == 10 else 2 * MS, 7 * MS) for n in range(30) if save or n != 10]
    steps = alike(30, forward_ns=6 * MS)
    steps[10] |= {"dur_ns": 8 * MS + save, "profiled": 1}
    run = measured(tmp_path, steps, made, stalls)
    parts = {SAVE: 2 * MS, "computation": 7 * MS, "host": MS}
    assert {name: asked(run, part, name)[0] for name in parts} == pytest.approx(parts)
    assert adds_up(run)


@pytest.mark.parametrize(("length", "pauses"), [(2 * MS, 2 * MS), (9 * MS, 3 * MS)])
def test_on_a_device_stalls_come_out_of_the_hosts_time_alone(tmp_path: Path, length: int, pauses: int) -> None:
    launched = traces.launched("gemm", 3 * MS - 10_000, 3 * MS, 7 * MS, 1)
    made = traces.trace(traces.step(10, 0, 10 * MS), launched, world_size=1)
    stalls = [stall(GC, n, length) for n in range(30)]
    run = measured(tmp_path, alike(30), made, stalls, device={"type": "cuda"})
    assert asked(run, part, "computation") == {0: pytest.approx(7 * MS)}
    assert asked(run, part, GC) == {0: pytest.approx(pauses, rel=0.01)}
    assert adds_up(run)


def rolls_out(n: int, **said: Any) -> dict[str, Any]:
    """Return a step of 10 ms, and of 90 ms every 16th time, 20 ms of those in forward passes."""
    if n % 16:
        return light(n, 10 * MS, forward_ns=2 * MS, forwards=1, **said)
    return light(n, 90 * MS, forward_ns=22 * MS, forwards=129, **said)


def test_every_16th_step_is_found_with_what_it_costs_and_where(tmp_path: Path) -> None:
    run = measured(tmp_path / "cpu", [rolls_out(n) for n in range(203)])
    (row,) = run.frame(periodic).to_dict("records")
    assert (row["every"], row["steps"], row["phase"], row["forwards"]) == (16, 12, "rest", 128)
    cost = 80 * MS * 12 / 200
    assert (row["extra_ns"], row["cost_ns"], row["noise_ns"]) == pytest.approx((80 * MS, cost, 0))
    assert asked(run, part, "periodic_work") == {0: pytest.approx(cost)}
    assert asked(run, part, "computation") == {0: pytest.approx(2 * MS)}
    # A known interval is no noise.
    assert run.frame(step_means)[["noise_ns", "step_ns"]].iloc[0].tolist() == pytest.approx([0, 10 * MS + cost], abs=1)
    assert run.frame(spread)["noise_ns"].iloc[0] == pytest.approx(0, abs=1)
    run = measured(tmp_path / "gpu", [rolls_out(n) for n in range(203)], device={"type": "cuda", "name": "A100"})
    with pytest.raises(NotMeasured, match="clock"):
        run.frame(periodic)


def test_it_is_found_among_steps_that_vary_by_chance_and_two_are_told_apart(tmp_path: Path) -> None:
    chance = random.Random(1)
    steps = [light(n, int((10 + chance.expovariate(1 / 5) + 100 * (n % 16 == 5)) * MS)) for n in range(300)]
    (row,) = measured(tmp_path / "one", steps).frame(periodic).to_dict("records")
    assert row["every"] == 16
    assert row["cost_ns"] == pytest.approx(100 * MS / 16, rel=0.1)
    steps = [light(n, (10 + 5 * (n % 10 == 0) + 200 * (n % 50 == 7)) * MS) for n in range(403)]
    rows = measured(tmp_path / "two", steps).frame(periodic).to_dict("records")
    assert [row["every"] for row in rows] == [50, 10]
    assert [row["extra_ns"] for row in rows] == pytest.approx([200 * MS, 5 * MS], rel=0.02)


def by_chance(seed: int) -> list[Any]:
    chance = random.Random(seed)
    return [light(n, int((10 + (80 if chance.random() < 0.06 else chance.random())) * MS)) for n in range(300)]


TURNS = [
    light(n, (10 + 20 * turn) * MS, backward_ns=(5 + 20 * turn) * MS, backwards=1 + turn)
    for n, turn in ((n, n % 5 == 0) for n in range(203))
]


@pytest.mark.parametrize(
    ("steps", "stalls"),
    [
        *((by_chance(seed), None) for seed in range(5)),
        # What a loader or a stall takes is counted there.
        ([light(n, (10 + 50 * (n % 8 == 0)) * MS, fetch_ns=50 * MS * (n % 8 == 0)) for n in range(203)], None),
        (
            [light(n, (10 + 50 * (n % 8 == 0)) * MS) for n in range(203)],
            [stall(SAVE, n, 50 * MS) for n in range(0, 203, 8)],
        ),
        # Another network's turn is training, and no noise.
        (TURNS, None),
    ],
)
def test_chance_and_what_is_known_have_no_interval(steps: list[Any], stalls: Any, tmp_path: Path) -> None:
    run = measured(tmp_path, steps, stalls=stalls)
    assert run.frame(periodic).empty
    if steps is TURNS:
        assert run.frame(step_means)["noise_ns"].iloc[0] == pytest.approx(0, abs=1)
        assert asked(run, part, "periodic_work") == {0: 0.0}


def test_traced_steps_with_it_are_left_out_and_others_are_no_noise(tmp_path: Path) -> None:
    steps = [rolls_out(n, profiled=int(30 <= n < 35)) for n in range(203)]
    events: list[Any] = []
    at = 0
    for n in range(30, 35):
        length = (10 if n % 16 else 90) * MS
        events += [traces.step(n, at, length), traces.annotation("dlprof::forward", at, 2 * MS)]
        events.append(traces.op("aten::mm", at, 2 * MS))
        at += length
    run = measured(tmp_path, steps, traces.trace(*events, device=""))
    (row,) = run.frame(step_means).to_dict("records")
    assert (row["traced_steps"], row["overhead"]) == (4, pytest.approx(1.0))
    assert asked(run, part, "periodic_work")[0] == pytest.approx(80 * MS * 11 / 195)
    assert asked(run, part, "computation")[0] == pytest.approx(2 * MS)
    assert asked(run, part_noise, "host") == pytest.approx(0, abs=1)


NOISE = np.random.default_rng(3).normal(size=200).tolist()


@pytest.mark.parametrize(
    ("ms", "several"),
    [
        ([2, 9] * 20, 2),
        ([4 + 3 * (n % 6 == 5) + 0.1 * NOISE[n] for n in range(60)], 6),
        ([10 + NOISE[n] for n in range(60)], 1),
        ([5 + n for n in range(60)], 1),  # they grow
        ([2 + 7 * (n % 2) + 8 * NOISE[n] ** 2 for n in range(60)], 1),  # their place says little
        ([2, 9] * 7, 1),  # too few
        ([2] * 40, 1),
        ([2 + 7 * (n % 12 == 3) for n in range(120)], 1),  # seldom: that is periodic work
    ],
)
def test_steps_that_come_in_turn_are_known_by_their_lengths(ms: Sequence[float], several: int, tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [light(n, int(of * MS)) for n, of in enumerate(ms)], runs.CPU))
    assert RankData(open_run(path).ranks[0]).once(in_turn) == several


@pytest.mark.parametrize(
    ("values", "several", "error"),
    [
        ([1, 7, 1, 7, 1], 2, 0.0),
        ([1, 7, 1, 7, 1], 1, standard_error(np.array([1, 7, 1, 7, 1.0]))),
        ([1, 7], 2, standard_error(np.array([1, 7.0]))),
        # What is left: 1, 0, -1, 0 and 0, with three degrees of freedom, and Student's t for three.
        ([2, 7, 0, 7, 1], 2, 1.62 * (2 / 3 / 5) ** 0.5),
    ],
)
def test_what_a_place_in_turn_explains_is_no_noise(values: list[float], several: int, error: float) -> None:
    assert error_in_turn(np.array(values, float), several) == pytest.approx(error)


def test_parts_of_steps_that_come_in_turn_are_as_sure_as_those_of_their_places(tmp_path: Path) -> None:
    # Traced steps of 2 and 10 ms in turn, of which an operator takes all but 1 ms.
    events, at = list[Any](), 0
    for n in range(6):
        length = (2, 10)[n % 2] * MS
        events += [traces.step(n, at, length), traces.op("aten::mm", at, length - MS)]
        at += length
    turns, chance = [2, 10] * 30, np.random.default_rng(0).choice([2, 10], 60).tolist()
    for lengths, sure in ((turns, True), (chance, False)):
        steps = [light(n, length * MS) for n, length in enumerate(lengths)]
        run = measured(tmp_path / str(sure), steps, traces.trace(*events, device=""))
        noise = part_noise(run.frame(breakdown), "computation")
        assert (noise < 0.01 * MS) is sure


ASYNC = TRACES / "gpu_async"


def test_a_device_behind_its_host_has_steps_of_its_own(tmp_path: Path) -> None:
    found = runs.rank_of(tmp_path, traces.ahead(4, host=1 * MS, busy=3 * MS)).once(trace_window)
    host, device = (w[:, 1] - w[:, 0] for w in (found.host, found.windows))
    assert host.tolist() == [1 * MS] * 4
    # The first begins with the trace, 10 µs before its first kernel.
    assert device.tolist() == [3 * MS + 10_000, 3 * MS, 3 * MS, 3 * MS]
    assert (found.windows[:, 0] - traces.BASE_NS).tolist() == [0, 3 * MS + 10_000, 6 * MS + 10_000, 9 * MS + 10_000]
    assert found.launched_in.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.lag_ns.tolist() == [10_000, 2 * MS + 10_000, 4 * MS + 10_000, 6 * MS + 10_000]
    assert (found.unit, found.linked) == ("step", 1.0)


def test_a_job_that_synchronises_has_its_hosts_steps(tmp_path: Path) -> None:
    found = runs.rank_of(tmp_path, traces.ahead(3, host=2 * MS, busy=1 * MS, synchronises=True)).once(trace_window)
    assert found.windows.tolist() == found.host.tolist()
    assert found.settled.all()


def test_the_steps_in_which_the_host_only_gets_its_lead_are_not_settled(tmp_path: Path) -> None:
    # Two steps run ahead of the device; from then on the host waits for room and goes at its pace.
    events: list[Any] = []
    hosts = [(0, 1), (1, 1), (2, 3), (5, 3), (8, 3)]
    for n, (at, dur) in enumerate(hosts):
        events.append(traces.step(n, at * MS, dur * MS))
        events += traces.launched("gemm", at * MS, 10_000 + 3 * n * MS, 3 * MS, n + 1)
    found = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(trace_window)
    assert found.lag_ns.tolist() == [10_000, 2 * MS + 10_000, 4 * MS + 10_000, 4 * MS + 10_000, 4 * MS + 10_000]
    assert found.settled.tolist() == [False, True, True, True, True]


def test_an_exchange_beside_the_main_stream_ends_its_step(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(3):
        t = 5 * MS * n
        events += [
            traces.step(n, 2 * MS * n, 2 * MS),
            traces.launched("gemm", 2 * MS * n, t + 10_000, 3 * MS, 10 * n + 1),
            traces.call("cudaLaunchKernelExC", 2 * MS * n + 50_000, 5_000, 10 * n + 2),
            traces.collective(t + 3 * MS + 10_000, 2 * MS, 1_000, correlation=10 * n + 2),
        ]
    found = runs.rank_of(tmp_path, traces.trace(*events)).once(trace_window)
    assert (found.windows[:, 1] - found.windows[:, 0]).tolist() == [5 * MS + 10_000, 5 * MS, 5 * MS]


def test_work_that_was_launched_before_the_trace_or_between_steps_is_of_none(tmp_path: Path) -> None:
    events = [
        traces.kernel("before", 0, 50_000, 0),
        traces.step(0, 60_000, 500_000),
        *traces.launched("gemm", 70_000, 100_000, 100_000, 1),
        traces.kernel("unlinked", 210_000, 10_000, 77),
        traces.step(1, 560_000, 500_000),
        *traces.launched("gemm", 570_000, 600_000, 100_000, 2),
    ]
    found = runs.rank_of(tmp_path / "before", traces.trace(*events, world_size=1)).once(trace_window)
    # What nobody launched goes with its neighbour on the stream, which runs in order.
    assert found.launched_in.tolist() == [-1, 0, 0, 1]
    assert found.linked == pytest.approx(0.5)
    events = [
        traces.step(0, 0, 100_000),
        *traces.launched("gemm", 0, 10_000, 50_000, 1),
        *traces.launched("validation", 200_000, 210_000, 50_000, 2),
        traces.step(7, 400_000, 100_000),
        *traces.launched("gemm", 400_000, 410_000, 50_000, 3),
    ]
    found = runs.rank_of(tmp_path / "between", traces.trace(*events, world_size=1)).once(trace_window)
    assert found.numbers.tolist() == [0, 7]
    assert found.launched_in.tolist() == [0, NO_STEP, 1]
    assert (found.windows - traces.BASE_NS).tolist() == [[0, 100_000], [400_000, 500_000]]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("launched_ms", "begins_ms"), [(1, 400), (399, 0)])
def test_a_device_that_is_still_at_work_of_before_the_trace_is_not_idle(
    launched_ms: int, begins_ms: int, marked: bool, tmp_path: Path
) -> None:
    events = [
        *traces.launched("small", 10_000, 20_000, 5_000, 1, stream=9),  # on another stream, at once
        *(
            one
            for n in range(20)
            for one in traces.launched("gemm", launched_ms * MS + n * 10_000, (400 + n) * MS, MS, n + 2)
        ),
        *([traces.step(4, 0, 400 * MS)] if marked else []),
    ]
    found = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(trace_window)
    assert (found.windows - traces.BASE_NS).tolist() == [
        [begins_ms * MS or 0 if marked else begins_ms * MS or 10_000, 420 * MS]
    ]


def test_a_step_that_launches_nothing_has_no_lag_and_no_length(tmp_path: Path) -> None:
    events = [
        traces.step(0, 0, 1 * MS),
        *traces.launched("gemm", 0, 10_000, 3 * MS, 1),
        traces.step(1, 1 * MS, 1 * MS),
        traces.step(2, 2 * MS, 1 * MS),
        *traces.launched("gemm", 2 * MS, 3 * MS + 10_000, 3 * MS, 2),
    ]
    found = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(trace_window)
    assert np.isnan(found.lag_ns).tolist() == [False, True, False]
    assert (found.windows[:, 1] >= found.windows[:, 0]).all()
    assert (found.windows[[0, -1], [0, 1]] - traces.BASE_NS).tolist() == [0, 6 * MS + 10_000]
    assert found.launched_in.tolist() == [0, 2]


@pytest.mark.parametrize("linked", [True, False])
def test_without_links_a_device_is_cut_at_its_hosts_marks(tmp_path: Path, linked: bool) -> None:
    made = traces.ahead(3, host=1 * MS, busy=2 * MS)
    for event in made["traceEvents"]:
        if event["cat"] == "cuda_runtime" and not linked:
            event["args"].pop("correlation")
    found = runs.rank_of(tmp_path, made).once(trace_window)
    # Three steps of 2 ms on the device: in the mean they are as long where only the host's marks cut them.
    ends = [1 * MS, 2 * MS, 6 * MS] if not linked else [2 * MS, 4 * MS, 6 * MS]
    assert found.windows[:, 1] - traces.BASE_NS == pytest.approx(ends, abs=20_000)
    assert (found.linked == 1.0) is linked


def test_only_loader_calls_mark_steps_where_nothing_else_does(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(4):
        events += [traces.fetch(n * MS, 10_000), *traces.launched("gemm", n * MS + 20_000, n * MS + 40_000, MS // 2, n)]
    infers = runs.rank_of(tmp_path / "infers", traces.trace(*events, world_size=1)).once(trace_window)
    assert (infers.unit, len(infers.windows)) == ("trace", 1)  # a loop over a loader alone is no training
    events += [traces.op("MulBackward0", n * MS + 30_000, 100) for n in range(4)]
    found = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(trace_window)
    assert found.unit == "step"
    assert (found.host - traces.BASE_NS).tolist() == [[0, MS], [MS, 2 * MS], [2 * MS, 3 * MS]]
    none = runs.rank_of(tmp_path / "none", traces.trace(*traces.launched("gemm", 0, 10, MS, 1))).once(trace_window)
    assert (none.unit, len(none.windows)) == ("trace", 1)


def test_the_main_stream_is_the_one_that_computes_most(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, 900_000),
        traces.launched("small", 0, 10_000, 100_000, 1, stream=7),
        traces.launched("large", 10_000, 20_000, 200_000, 2, stream=9),
        traces.collective(0, 800_000, 10, stream=21),
    )
    rank = runs.rank_of(tmp_path, made)
    assert rank.once(main_stream).tolist() == [False, False, True]


# Kernels and copies a step, and of them NCCL's or RCCL's; of each steady step, ms, from the least to the most: its
# length, computation, communication and what of it is exposed.
JOBS: dict[str, tuple[tuple[int, int], tuple[tuple[float, float], ...]]] = {
    "v100_ns": ((1_219, 0), ((95.6, 95.6), (93.7, 93.7), (0, 0), (0, 0))),
    "mi300_resnet": ((895, 4), ((18.6, 19.0), (6.4, 6.4), (15.4, 15.9), (11.4, 12.0))),
    "v100_rank1_of_2": ((2_503, 10), ((114.8, 123.1), (85.2, 87.5), (36.4, 39.5), (10.5, 13.5))),
    "queued_graph": ((1_375, 15), ((215, 216), (35.7, 36.3), (26.7, 37.8), (26, 37))),
}


@pytest.mark.skipif(not ASYNC.is_dir(), reason="the reference traces are not here (../shared/traces)")
@pytest.mark.parametrize("name", JOBS)
def test_work_and_time_of_real_jobs_are_those_of_the_step_that_launched_them(name: str) -> None:
    rank = RankData(open_run(ASYNC / f"{name}.json.gz").ranks[0])
    (pieces, exchanged), times = JOBS[name]
    work, found = rank.once(device.device_work), rank.once(trace_window)
    inside = (found.launched_in >= 0) & (found.launched_in < len(found.windows))
    of = found.launched_in[inside]
    exchanges = host.is_kind(work, "communication")[inside]
    assert np.bincount(of).tolist() == [pieces] * len(found.windows)
    assert np.bincount(of[exchanges], minlength=len(found.windows)).tolist() == [exchanged] * len(found.windows)
    t, sets = rank.once(timing), rank.once(device.device_sets)
    parts = (sets.computation, sets.communication, sets.exposed_communication)
    within = [iv.total(iv.intersect(iv.merge(t.windows), part)) / len(t.windows) for part in parts]
    for mean, (least, most) in zip([t.step_ns, *within], times, strict=True):
        assert 0.99 * least <= mean / 1e6 <= 1.01 * most
    if name == "v100_ns":  # the step in which the host runs ahead is left out
        assert (np.diff(found.host)[:, 0] / 1e6).round().tolist() == [35, 72, 96, 96, 96]
        assert t.chosen.tolist() == [1, 2, 3, 4]
