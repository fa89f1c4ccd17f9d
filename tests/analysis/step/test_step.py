"""The parts of a step on hand-made steps: they add up to it, with their noise, what would be saved, and the drawing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Measured, RankData
from dlprof.analysis.notices import warnings
from dlprof.analysis.panels.step import MOST_STREAMS, MOST_WORKERS, excerpt
from dlprof.analysis.source.line_shares import lines_between
from dlprof.analysis.step.breakdown import blocked, breakdown, contention, most_saved_ns, part, part_noise
from dlprof.analysis.step.partition import partition
from dlprof.analysis.step.savings import own_time, saving, saving_in_pipelines, saving_input, spread, window_likeness
from dlprof.analysis.step.whole_job import (
    PARTS,
    began_ns,
    first_times,
    step_times,
    unused_forward,
    validation,
    whole_job,
)
from dlprof.analysis.timeline.steady import STRETCHES, standard_error
from dlprof.analysis.timeline.steps import step_means, timing
from dlprof.errors import NotMeasured
from dlprof.read.run import Rank, open_run
from dlprof.result import QUANTILES
from tests.fixtures import layers, runs, traces
from tests.fixtures.claims import sample
from tests.fixtures.exchanges import NEEDS, late_by, run_of
from tests.fixtures.runs import MS, asked, light
from tests.fixtures.sampled_stacks import MAIN

US, S = 1_000, 1_000 * MS
CPU_TRACE: dict[str, Any] = {"backend": "gloo", "device": ""}
CUDA = {"device": {"type": "cuda", "name": "NVIDIA H100"}}
PHASED = [light(n, 20 * MS, forward_ns=4 * MS, backward_ns=6 * MS) for n in range(50)]

ONE = traces.step(1, 0, 1_000 * US)
# A rank's hook in Python waits for a collective in the backward pass; an operator computes what its parts do not show.
WAITS = [
    ONE,
    traces.op("aten::linear", 0, 200 * US),
    traces.op("aten::cat", 200 * US, 100 * US),
    traces.op("c10d::_reduce_scatter_base_", 300 * US, 50 * US),
    traces.annotation("gloo:all_reduce", 300 * US, 400 * US, tid=traces.AUTOGRAD),
    traces.op("aten::div_", 790 * US, 10 * US),
]
DIVIDED: dict[str, Any] = {
    # [300, 600) computes, [550, 700) communicates, [700, 750) copies. The host has [200, 255), [750, 800) and
    # [980, 1000), in which it launched too late or nothing; latency is from the end of the two launches on.
    "a device and its host": (
        [ONE, traces.fetch(0, 200 * US), traces.launched("gemm", 250 * US, 300 * US, 300 * US, 1),
         traces.collective(550 * US, 150 * US, 1_000), traces.copy(700 * US, 50 * US, 1_000_000),
         traces.annotation("Optimizer.step#SGD.step", 800 * US, 150 * US),
         traces.launched("late", 940 * US, 960 * US, 20 * US, 2)],
        {}, {"computation": 320, "communication": 100, "copy": 50, "input_wait": 200, "optimizer_host": 145,
             "host": 125, "launch_latency": 60}),
    "a wait behind which the device computes": (
        [ONE, traces.fetch(0, 400 * US), traces.kernel("gemm", 0, 1_000 * US)], {}, {"computation": 1_000}),
    "waiting inside the device": (
        [ONE, traces.launched("a", 0, 5 * US, 400 * US, 1), traces.launched("b", 10 * US, 600 * US, 400 * US, 2)],
        {}, {"computation": 800, "host": 5, "queued_wait": 195}),
    # On the CPU operators are the computation, and the loader's collating is not, nor an operator inside another.
    "on the CPU": (
        [ONE, traces.fetch(0, 200 * US, "_SingleProcessDataLoaderIter"), traces.op("aten::stack", 50 * US, 100 * US),
         traces.op("aten::conv2d", 250 * US, 300 * US), traces.op("aten::convolution", 260 * US, 200 * US),
         traces.annotation("gloo:all_reduce", 500 * US, 200 * US, tid=traces.MAIN),
         traces.annotation("Optimizer.step#SGD.step", 800 * US, 100 * US), traces.op("aten::add_", 820 * US, 30 * US)],
        CPU_TRACE, {"computation": 330, "communication": 150, "input_wait": 200, "optimizer_host": 70, "host": 250}),
    "a call that blocks in a collective": (
        [ONE, traces.op("aten::linear", 0, 800 * US), traces.op("c10d::allreduce_", 300 * US, 400 * US)], CPU_TRACE,
        {"computation": 400, "communication": 400, "host": 200}),
    **{name: ([*WAITS[:2], traces.op(name, 200 * US, 600 * US), *WAITS[2:]], CPU_TRACE,
              {"computation": computed, "communication": communicates, "host": 1_000 - computed - communicates})
       for name, computed, communicates in (("RegisterPostBackwardFunctionBackward", 400, 400),
                                            ("autograd::engine::evaluate_function: AddmmBackward0", 400, 400),
                                            ("AddmmBackward0", 750, 50), ("CompiledFunctionBackward", 750, 50))},
}  # fmt: skip


@pytest.mark.parametrize("name", DIVIDED)
def test_a_step_is_divided_into_exclusive_parts(tmp_path: Path, name: str) -> None:
    events, keys, parts = DIVIDED[name]
    rank = runs.rank_of(tmp_path, traces.trace(*events, **keys))
    found = rank.once(partition)
    assert iv.merge(*found.values()).tolist() == iv.merge(rank.once(timing).windows).tolist()
    assert {category: iv.total(part) / US for category, part in found.items() if len(part)} == pytest.approx(parts)


@pytest.mark.parametrize("sign", ["runtime", "nccl", "backend"])
def test_a_gpu_job_traced_without_its_gpu_abstains(tmp_path: Path, sign: str) -> None:
    shows = {"runtime": [traces.call("cudaLaunchKernel", 2000, 100, 1)],
             "nccl": [traces.annotation("nccl:all_reduce", 2000, 100)]}  # fmt: skip
    events = [traces.step(1, 0, MS), traces.op("aten::mm", 0, 1000), *shows.get(sign, ())]
    made = traces.trace(*events, backend="nccl" if sign == "backend" else "", device="")
    with pytest.raises(NotMeasured, match="nothing of the GPU"):
        runs.rank_of(tmp_path, made).once(partition)


def warned(path: Path) -> list[str]:
    return runs.measured(path, warnings).call(warnings)


def parts(run: Measured, *names: str) -> dict[str, float]:
    """Return parts of the mean step of rank 0, ms; all of which add up to it."""
    frame = run.frame(breakdown)
    mine = frame[frame["rank"] == 0]
    assert mine["ns"].sum() == pytest.approx(run.frame(step_means)["step_ns"][0])
    return {name: asked(run, part, name)[0] / MS for name in names or mine["category"]}


# Untraced: 1 ms fetch, 3 ms forward, 1 ms else. The profiler made forward (all operators) 2 × and else 3 × as long.
SLOWED = traces.trace(traces.step(10, 0, 10 * MS), traces.fetch(0, MS),
                      traces.annotation("dlprof::forward", MS, 6 * MS), traces.op("aten::mm", MS, 4 * MS),
                      **CPU_TRACE)  # fmt: skip
SHORTER = traces.trace(traces.step(10, 0, 10 * MS), traces.annotation("dlprof::optimizer", 0, 4 * MS),
                       traces.annotation("horovod:all_reduce", 0, 2 * MS), traces.op("aten::add_", 2 * MS, MS),
                       device="", backend="")  # fmt: skip
DEVICE = traces.trace(traces.step(10, 0, 10 * MS), traces.annotation("dlprof::forward", 0, 10 * MS),
                      traces.kernel("gemm", 6 * MS, 4 * MS))  # fmt: skip
AHEAD = traces.ahead(6, host=MS, busy=2 * MS)
UNTRACED: dict[str, Any] = {
    # Four of six ms of forward, so two thirds of three.
    "slowed by the profiler": (SLOWED, {"dur": 5, "fetch_ns": 1, "forward_ns": 3}, runs.CPU,
                               {"computation": 2, "input_wait": 1, "host": 2}),
    # A phase that was shorter when traced waits for longer else.
    "a longer phase": (SHORTER, {"dur": 15, "optimizer_ns": 9}, runs.CPU,
                       {"communication": 7, "computation": 1, "optimizer_host": 1}),
    # Device work keeps its time whatever the profiler did to the host.
    "work of a device": (DEVICE, {"dur": 5, "forward_ns": 5}, CUDA, {"computation": 4, "host": 1}),
    # Of a step that was not traced only the phases are known, and only on a CPU.
    "no trace": (None, {"dur": 9, "fetch_ns": 1, "forward_ns": 3, "backward_ns": 2, "optimizer_ns": 1}, runs.CPU,
                 {"input_wait": 1, "computation": 5, "optimizer_host": 1, "other": 2}),
    "no trace of two ranks": (None, {"dur": 9, "forward_ns": 3, "backward_ns": 2}, {**runs.CPU, "world_size": 2},
                              {"computation": 3, "other": 6}),
    # Untraced steps of 3 ms that wait for data are longer for it, as far as they are longer.
    "a longer wait": (AHEAD, {"dur": 3, "device_step_ns": 3, "fetch_ns": 0.9}, CUDA,
                      {"computation": 2, "input_wait": 0.9}),
    "a hidden wait": (AHEAD, {"dur": 3, "device_step_ns": 3, "fetch_ns": 2.9}, CUDA, {"input_wait": 1}),
    "not recorded": (AHEAD, {"dur": 3, "device_step_ns": 3}, CUDA, {"other": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNTRACED)
def test_the_parts_are_brought_to_the_steps_that_were_not_traced(tmp_path: Path, name: str) -> None:
    made, step, facts, expected = UNTRACED[name]
    ns = {key: int(value * MS) for key, value in step.items()}
    path = runs.recorded(tmp_path / "run", (made, [light(n, **ns) for n in range(40)], facts))
    run = runs.measured(path, breakdown, step_means)
    assert parts(run, *expected) == pytest.approx(expected, rel=0.05)
    if name == "slowed by the profiler":
        assert run.frame(step_means)["overhead"][0] == pytest.approx(2.0)
    if name == "not recorded":
        (said,) = (w for w in warned(path) if "not in the traced steps" in w)
        assert said.startswith("33 % of a step is not in the traced steps")


def test_the_mean_is_over_the_steps_and_without_records_there_is_none(tmp_path: Path) -> None:
    second = [traces.step(2, MS, 3 * MS), traces.fetch(MS, 2 * MS), traces.kernel("gemm", 3 * MS, MS)]
    made = traces.trace(traces.step(1, 0, MS), traces.kernel("gemm", 0, MS), *second, world_size=1)
    run = runs.measured(runs.foreign(tmp_path / "a", made), breakdown, step_means)
    assert parts(run) == {"computation": 1, "input_wait": 1}
    gpu = runs.recorded(tmp_path / "b", (None, [light(n, 5 * MS, fetch_ns=MS) for n in range(30)], CUDA))
    with pytest.raises(NotMeasured, match="trace"):
        runs.measured(gpu, breakdown).frame(breakdown)
    with pytest.raises(NotMeasured):
        RankData(Rank(0)).once(breakdown)


@pytest.mark.parametrize(
    ("busy", "least", "most"), [([0.5] * 4, 0, 0), ([0, 0.25, 0.5, 0.75], 0.1 * MS, MS)], ids=["even", "uneven"]
)
def test_parts_that_vary_between_the_steps_say_how_much(
    tmp_path: Path, busy: list[float], least: float, most: float
) -> None:
    events = [(traces.step(n, n * MS, MS), traces.kernel("gemm", n * MS, int(b * MS))) for n, b in enumerate(busy)]
    made = traces.trace(*(event for both in events for event in both), world_size=1)
    run = runs.measured(runs.foreign(tmp_path, made), breakdown)
    assert least <= asked(run, part_noise, "host") <= most


def test_all_steps_tell_how_sure_the_hosts_part_is(tmp_path: Path) -> None:
    # The device computes 2 ms of each step; the host takes 1, 3 and 2 ms more in the traced steps, and 2 in the mean.
    events: list[Any] = []
    for n, at, host in ((0, 0, 1), (1, 3, 3), (2, 8, 2)):
        launch = traces.launched("gemm", at * MS, at * MS + 10_000, 2 * MS, n + 1)
        events += [traces.step(n, at * MS, (2 + host) * MS), *launch]
    made = traces.trace(*events, world_size=1)
    steps = [light(n, 4 * MS + (n % 2) * 20_000) for n in range(60)]
    run = runs.measured(runs.recorded(tmp_path / "run", (made, steps, CUDA)), breakdown, step_means)
    assert parts(run, "host")["host"] == pytest.approx(2, rel=0.05)
    assert asked(run, part_noise, "host") < 0.01 * MS
    alone = runs.measured(runs.foreign(tmp_path / "trace", made), breakdown, step_means)
    assert asked(alone, part_noise, "host") > 0.5 * MS


@pytest.mark.parametrize(
    ("still", "communication", "threads"), [(500, 450, 1), (100, 100, 1), (220, 200, 1), (500, 200, 2)]
)
def test_standing_still_in_every_step_bounds_communication(
    tmp_path: Path, still: int, communication: int, threads: int
) -> None:
    """Of 1 ms the trace shows 200 µs of communication and 50 µs of Python: who waits for it stands still.

    A thread that shares its work waits for other threads too.
    """
    computes = traces.op("aten::conv2d", 0, 750 * US)
    reduces = traces.annotation("gloo:all_reduce", 750 * US, 200 * US, tid=traces.MAIN)
    made = traces.trace(traces.step(20, 0, MS), computes, reduces, **CPU_TRACE)
    steps = [light(n, MS, profiled=int(n == 20)) for n in range(21)]
    facts = {**runs.CPU, "backend": "gloo", "cpu": {"torch_threads": threads}}
    path = runs.recorded(tmp_path / "run", (made, steps, facts))
    runs.loading(path, 0, step=MS, wait=still * US, fetch=0, cpu=0, n=20, workers=1)
    found = parts(runs.measured(path, breakdown, step_means))
    assert found["communication"] == pytest.approx(communication / 1_000)
    # What shares the difference keeps its proportion.
    assert found["computation"] / found["host"] == pytest.approx(15)


def test_the_room_is_a_ranks_own_time_and_its_waiting_for_anothers(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path / "one", traces.training(world_size=1)), breakdown)
    # Of each step of 990 µs: 550 computing, 120 in a reduction that nothing hides, 25 copying, 100 waiting for data.
    wanted: tuple[tuple[list[str], int], ...] = ((["copy"], 25), (["computation", "copy"], 575),
                                                 (["communication"], 120), (["checkpoint"], 0), ([], 0))  # fmt: skip
    assert [asked(run, most_saved_ns, names) for names, _ in wanted] == [us * US for _, us in wanted]
    # Rank 0 waits 100 µs for data itself. Rank 1's 5 µs may be waited for on rank 0, in its reduction of 120 µs.
    busy = traces.training(rank=1)
    for event in busy["traceEvents"]:
        if event["name"].startswith("enumerate(DataLoader)"):
            event["dur"] = 5.0  # µs, of 100
    run = runs.measured(runs.foreign(tmp_path / "two", traces.training(rank=0), busy), breakdown)
    assert asked(run, most_saved_ns, ["input_wait"]) == 105 * US
    # Ranks that stand still in turn have the sum: 10 ms a step of their own, and 10 ms of waiting for the other's,
    # which is without a trace among the other time.
    pauses = [[runs.stall("garbage_collection", n, 20 * MS) for n in range(r, 30, 2)] for r in (0, 1)]
    rank = (None, [light(n, 100 * MS, first=int(n == 0)) for n in range(30)], runs.CPU)
    run = runs.measured(runs.recorded(tmp_path / "stalls", rank, rank, stalls=pauses), breakdown)
    assert asked(run, most_saved_ns, ["garbage_collection"]) == pytest.approx(20 * MS, rel=0.1)


GLOO = {**runs.CPU, "backend": "gloo", "cpu": {"torch_threads": 1}}


def used(folder: Path, facts: dict[str, Any], n: int = 20, files: str = "steps loading", **more: Any) -> RankData:
    """Return a rank of steps of 10 ms, of which its training thread stands still for 2."""
    path = runs.recorded(folder / "run", (None, [light(k, 10 * MS) for k in range(n)], facts))
    runs.loading(path, 0, **{"step": 10 * MS, "wait": 2 * MS, "fetch": 0, "cpu": 0, "n": n, "workers": 1} | more)
    return RankData(Rank(0, {name: path / f"ranks/00000/{name}.jsonl" for name in files.split()}, facts))


@pytest.mark.parametrize(
    ("other", "n", "known"),
    [
        ({}, 20, True),
        ({"cpu": {"torch_threads": 4}}, 20, False),  # it waits for the threads that compute with it
        ({"backend": "mpi"}, 20, False),  # it runs while it waits
        ({"device": {"type": "cuda"}}, 20, False),  # it waits for the device
        ({"backend": None}, 20, False),
        ({}, 6, False),  # a few readings are not enough
    ],
)
def test_what_is_neither_run_nor_waited_for_a_core_is_stood_still(
    tmp_path: Path, other: dict[str, Any], n: int, known: bool
) -> None:
    found = used(tmp_path, GLOO | other, n).once(blocked)
    assert found == (pytest.approx((2 * MS, 0.0), abs=1) if known else None)


def test_what_computes_beside_the_training_thread(tmp_path: Path) -> None:
    """Of 8 ms that the process computes in a step, 5 are the training thread's; a worker 1.5 for each batch."""
    more = {"delay": MS, "thread": 5 * MS, "cpu": 3 * MS // 2, "fetch": 2 * MS}
    with_workers = used(tmp_path / "a", GLOO, files="steps loading fetches", **more)
    without = used(tmp_path / "b", GLOO, workers=0, delay=MS, thread=5 * MS)
    for rank, loads in ((with_workers, 1.5 * MS), (without, 0.0)):
        row = {"delay_ns": MS, "others_ns": 3 * MS, "loader_ns": loads}
        assert rank.once(contention).to_dict("records") == [row]
    with pytest.raises(NotMeasured, match="threads"):
        used(tmp_path / "c", GLOO | {"cpu": {"torch_threads": 4}}).once(contention)
    with pytest.raises(NotMeasured, match="each batch"):  # there are workers, and nobody saw what they fetch
        used(tmp_path / "d", GLOO).once(contention)


def test_own_time_is_the_common_step_less_waiting_and_bounds_what_is_saved(tmp_path: Path) -> None:
    run = run_of(tmp_path, late_by(0, MS))
    frame = run.frame(own_time)
    assert frame[["own_ns", "wait_ns"]].to_numpy().tolist() == [pytest.approx([4 * MS, MS]), pytest.approx([5 * MS, 0])]
    assert frame["known"].all()
    for removed, saved in (({}, 0), ({0: 1e12, 1: 1e12}, 5 * MS), ({1: -5.0 * MS}, 0), ({1: 0.5 * MS}, 0.5 * MS)):
        assert asked(run, saving, removed) == pytest.approx(saved)


def test_of_ranks_that_were_not_traced_it_is_not_known_what_would_be_gone(tmp_path: Path) -> None:
    run = runs.cpu_run(tmp_path, *[10 * MS] * 4)
    for rank in (1, 2):
        runs.asked_for_none(run / f"ranks/{rank:05d}", "0,last")
    times = runs.measured(run, own_time)
    assert times.frame(own_time)["traced"].tolist() == [True, False, False, True]
    for removed, saved in (({0: 2, 3: 1}, 1), ({0: 2}, 0), ({0: 2, 1: 0.5, 3: 1}, 0.5)):
        assert asked(times, saving, {r: ms * MS for r, ms in removed.items()}) == pytest.approx(saved * MS)


def test_the_wait_of_one_rank_costs_all_as_far_as_it_is_the_slowest(tmp_path: Path) -> None:
    def waits(*each: int, made: list[Any], step: int, facts: Any, name: str) -> float:
        ranks = [(m, [light(n, step, fetch_ns=w) for n in range(43)], facts) for m, w in zip(made, each, strict=True)]
        run = runs.measured(runs.recorded(tmp_path / name, *ranks), *NEEDS)
        return asked(run, saving_input, {rank: float(w) for rank, w in enumerate(each)})

    gpu = {"device": {"type": "cuda"}, "host": "node-1"}
    assert waits(0, 400_000, made=late_by(0, MS), step=5 * MS, facts=gpu, name="a") == pytest.approx(400_000)
    # Where waiting is not known equal work is assumed.
    assert waits(0, 4 * MS, made=[None, None], step=10 * MS, facts=runs.CPU, name="b") == pytest.approx(4 * MS)


def test_what_holds_one_stage_up_holds_up_its_neighbours() -> None:
    # Two pipelines of two stages. Stage 0 of both exchanges for 30 ms too long; stage 1 computes for longer, and idles.
    own = pd.DataFrame({"rank": range(4), "own_ns": [90.0 * MS, 70.0 * MS] * 2, "traced": True})
    pipelines = pd.DataFrame({"rank": range(4), "ranks": ["0, 1", "0, 1", "2, 3", "2, 3"]})
    removed = {0: 30.0 * MS, 2: 30.0 * MS}
    idle = pd.DataFrame({"rank": [1, 3], "category": "pipeline_bubble", "ns": 20.0 * MS})
    assert saving_in_pipelines(own, removed, pipelines, idle) == pytest.approx(20 * MS)
    # No more than a stage idles, and no more than the slowest pipeline gains.
    assert saving_in_pipelines(own, removed, pipelines, idle.assign(ns=5.0 * MS)) == pytest.approx(20 * MS)
    assert saving_in_pipelines(own, {0: 30.0 * MS}, pipelines, idle) == 0.0
    assert saving_in_pipelines(own, removed, None, idle) == saving(own, removed)


def test_a_mean_has_the_error_of_its_scatter_or_of_its_drift(tmp_path: Path) -> None:
    for name, lengths in (("scatter", [100 * MS + (MS if n % 2 else -MS) for n in range(103)]),
                          ("drift", [100 * MS + n * MS // 10 for n in range(203)])):  # fmt: skip
        path = runs.recorded(tmp_path / name, (None, [light(n, dur) for n, dur in enumerate(lengths)], runs.CPU))
        (row,) = runs.measured(path, spread).frame(spread).to_dict("records")
        steady = np.array(lengths[-int(row["steps"]) :], dtype=float)
        assert row["step_ns"] == pytest.approx(steady.mean())
        stretches = np.array([part.mean() for part in np.array_split(steady, STRETCHES)])
        assert row["noise_ns"] == pytest.approx(standard_error(steady if name == "scatter" else stretches))
        quantiles = [row[f"q{i}"] for i in range(len(QUANTILES))]
        assert quantiles == pytest.approx(np.quantile(steady, QUANTILES).tolist())
    one = runs.foreign(tmp_path / "one", traces.training(steps=1, world_size=1))
    (row,) = runs.measured(one, spread).frame(spread).to_dict("records")
    assert row["steps"] == 1
    assert math.isnan(row["noise_ns"])


def window(folder: Path, lengths: list[int]) -> dict[Any, Any]:
    """Return how a window of four steps of 2 ms, from the 20th on, is like the other steps."""
    made = traces.ahead(4, host=2 * MS, busy=MS, synchronises=True)
    steps = [light(n, ns, device_step_ns=ns, profiled=int(20 <= n < 24)) for n, ns in enumerate(lengths)]
    (row,) = (
        RankData(open_run(runs.recorded(folder, (made, steps, runs.GPU))).ranks[0])
        .once(window_likeness)
        .to_dict("records")
    )
    return row


def test_how_long_traced_steps_are_and_those_after_them(tmp_path: Path) -> None:
    row = window(tmp_path / "a", [1_600 * US] * 20 + [2 * MS] * 4 + [1_920 * US] * 20)
    assert (row["ratio"], row["after"]) == (pytest.approx(2 / 1.76, rel=0.02), pytest.approx(1.2))
    assert (row["after_noise"], row["linked"], row["left_out"]) == (0, 1, "")
    # A pause now and then is no profiler that stays.
    assert window(tmp_path / "b", [30 * MS if n in (30, 40, 50) else MS for n in range(60)])["after"] == 1.0


def test_steps_that_are_left_out_and_work_without_a_launch_are_counted(tmp_path: Path) -> None:
    made = traces.ahead(4, host=MS, busy=2 * MS)
    for event in made["traceEvents"]:
        if event["cat"] == "cuda_runtime" and event["args"]["correlation"] == 31:
            event["args"].pop("correlation")
    (row,) = runs.rank_of(tmp_path / "a", made).once(window_likeness).to_dict("records")
    assert (row["linked"], row["left_out"]) == (pytest.approx(7 / 8), "1 step in which the host only gained its lead")
    assert math.isnan(row["ratio"])
    assert math.isnan(row["after"])
    # A step that launches nothing is no step of the job.
    events: list[Any] = []
    for n in range(6):
        launch = traces.launched("gemm", n * 5 * MS, n * 5 * MS + 10_000, 4 * MS, n + 1)
        events += [traces.step(n, n * 5 * MS, 5 * MS), *(launch if n != 3 else [])]
    rank = runs.rank_of(tmp_path / "b", traces.trace(*events, world_size=1))
    assert rank.once(window_likeness)["left_out"].tolist() == ["1 step that launched nothing on the device"]
    assert rank.once(timing).numbers.tolist() == [0, 1, 2, 4, 5]
    assert any("1 step that launched nothing" in warning for warning in warned(tmp_path / "b"))
    on_cpu = traces.trace(traces.step(0, 0, MS), traces.op("aten::mm", 0, MS), device="", backend="")
    assert runs.rank_of(tmp_path / "c", on_cpu).once(window_likeness).empty


def test_every_step_of_the_whole_job_counts_once(tmp_path: Path) -> None:
    steps = [light(n, S) for n in range(40)]
    told: dict[int, dict[str, Any]] = {0: {"first": 1}, 10: {"profiled": 1}, 11: {"profiled": 1}, 23: {"first": 1},
                                       **{n: {"kind": "validation", "first": int(n == 20)} for n in (20, 21, 22)},
                                       39: {"kind": "other", "first": 1}}  # fmt: skip
    steps = [step | told.get(n, {}) for n, step in enumerate(steps)]
    facts = {**runs.CPU, "clock": {"unix_ns": traces.BASE_NS - 5 * S, "perf_ns": 0}}
    stalls = [runs.stall("checkpoint", 5, 300 * MS), runs.stall("checkpoint", 21, 200 * MS)]
    resumed = [traces.BASE_NS + 30 * S + S // 4]
    path = runs.recorded(tmp_path / "run", (None, steps, facts), stalls=[stalls], resumed_ns=resumed)
    run = runs.measured(path, whole_job, step_means)
    frame = run.frame(whole_job)
    assert {r["part"]: (r["steps"], r["ns"] / MS) for r in frame.to_dict("records")} == {
        "setup": (0, 5_000),
        "warmup": (4, 4_000),  # the first step of all, too
        "steady": (27, 27_000),
        "traced": (2, 2_000),
        "epoch_ends": (1, 1_000),
        "validation": (3, 3_000),
        "other": (1, 1_000),
        "suspended": (2, 2_000),  # nobody knows to the instant when it went on
        "checkpoint": (2, 500),
    }
    assert run.frame(step_means)["steps"][0] == 27
    assert frame.loc[frame["part"].isin(PARTS), "ns"].sum() == 45 * S
    bare = runs.foreign(tmp_path / "traces", traces.trace(traces.step(1, 0, MS)))
    with pytest.raises(NotMeasured, match="no record of every step"):
        runs.measured(bare, whole_job).frame(whole_job)


def test_phases_of_validation_their_distance_and_what_they_wait_for(tmp_path: Path) -> None:
    def phases(steps: list[dict[str, Any]], name: str, **info: Any) -> Any:
        run = runs.measured(runs.recorded(tmp_path / name, (None, steps, runs.CPU), **info), validation)
        return run.frame(validation).iloc[0]

    kinds: dict[str, dict[str, Any]] = {"t": {"kind": "train"}, "v": {"kind": "validation", "fetch_ns": 4 * MS}}
    row = phases([light(n, 10 * MS) | kinds[k] for n, k in enumerate("ttttvvttttvvvttttv")], "a")
    assert row[["phases", "steps", "every", "fetches"]].tolist() == [3, 6, 4.0, 2.0]
    assert (row["phase_ns"], row["fetch_share"]) == pytest.approx((20 * MS, 0.4))
    # A phase in which the job was suspended is no longer for it.
    steps = [light(n, S, kind="validation" if 8 <= n < 12 else "train") for n in range(20)]
    steps[9]["dur_ns"] = 100 * S
    for n in range(10, 20):
        steps[n]["start_ns"] += 99 * S
    row = phases(steps, "b", resumed_ns=[steps[9]["start_ns"] + 99 * S])
    assert row[["phases", "steps", "phase_ns"]].tolist() == [1, 3, 3 * S]


def test_forward_passes_for_nothing_are_those_of_every_step(tmp_path: Path) -> None:
    always, seldom = ({"unused_forward_ns": ms * MS, "forward_ns": 8 * MS, "forwards": 2} for ms in (3, 6))
    for name, steps, ns in (("a", [always] * 50, 3 * MS), ("b", [seldom if n % 7 == 0 else {} for n in range(50)], 0)):
        lights = [light(n, 20 * MS, **{"unused_forward_ns": 0} | said) for n, said in enumerate(steps)]
        run = runs.measured(runs.recorded(tmp_path / name, (None, lights, runs.CPU)), unused_forward)
        row = run.frame(unused_forward).iloc[0]
        assert row["ns"] == ns
        if ns:
            assert row[["noise_ns", "share", "forwards"]].tolist() == [0.0, pytest.approx(3 / 8), 2]


LOSS = f"{MAIN};main (/me/train.py:50);cross_entropy (/lib/python3.11/site-packages/torch/nn/functional.py:9) 20\n"
WRITTEN = {"calls": [{"kind": "loss", "file": "me/train.py", "line": 71, "end_line": 72, "count": 3}], "directory": "/"}


@pytest.mark.parametrize(
    ("facts", "longer", "stalled", "lines"),
    [
        ({}, 0, 0, {70: 6, 71: 2}),
        (WRITTEN, 0, 0, {70: 6}),  # a loss that the script writes out is none of its own lines
        ({}, 0, 2, {70: 4.8, 71: 1.6}),
        ({}, 20, 0, {70: 6, 71: 2}),  # in one step of ten
    ],
    ids=["a loss", "a written loss", "stalls", "periodic"],
)
def test_lines_share_the_time_between_the_phases(
    tmp_path: Path, facts: dict[str, Any], longer: int, stalled: int, lines: dict[int, float]
) -> None:
    steps = [step | {"dur_ns": (20 + longer * (n % 10 == 0)) * MS} for n, step in enumerate(PHASED)]
    stalls = [runs.stall("garbage_collection", n, stalled * MS, after=15 * MS) for n in range(50 if stalled else 0)]
    stacks = f"{MAIN};main (/me/train.py:70) 60\n{LOSS}{MAIN};main (/me/train.py:71) 20\n"
    rank = (None, steps, {**runs.CPU, "pid": 10, **facts})
    path = sample(runs.recorded(tmp_path, rank, stalls=[stalls]), stacks)
    frame = runs.measured(path, lines_between).frame(lines_between)
    assert dict(zip(frame["line"], frame["ns"] / MS, strict=True)) == pytest.approx(lines, rel=0.01)
    if not (facts or longer or stalled):
        assert frame["noise_ns"].iloc[0] == pytest.approx((0.6 * 0.4 / 100) ** 0.5 * 10 * MS)


@pytest.mark.parametrize("seen", [100, 4])
def test_lines_are_told_where_one_rank_was_seen_often_enough(tmp_path: Path, seen: int) -> None:
    path = runs.recorded(tmp_path, *[(None, PHASED, {**runs.CPU, "pid": 10})] * 2)
    for rank, times in enumerate((seen, 4)):
        sample(path, f"{MAIN};main (/me/train.py:70) {times}\n", rank)
    run = runs.measured(path, lines_between)
    if seen == 100:
        assert run.frame(lines_between)["ns"].tolist() == [10 * MS, 10 * MS]
    else:
        with pytest.raises(NotMeasured, match="too few stacks"):
            run.frame(lines_between)


def test_pictures_count_from_the_first_of_what_is_drawn_on_one_clock(tmp_path: Path) -> None:
    week = 7 * 86_400 * 10**9
    assert (began_ns((50, 20), own=30), began_ns((), own=30), began_ns((30 - week, 25), own=30)) == (20, 30, 25)
    rank = (None, [light(n, 10 * MS) for n in range(4)], runs.CPU)
    run = runs.measured(runs.recorded(tmp_path, rank), step_times)
    assert run.frame(step_times).tolist() == [0, S, 2 * S, 3 * S]
    assert len(run.frame(first_times)) == 1


def drawn(folder: Path, *events: Any) -> pd.DataFrame:
    return runs.rank_of(folder, traces.trace(*events)).once(excerpt)


def pieces(frame: pd.DataFrame, lane: str) -> list[tuple[str, int, int]]:
    """Return what is drawn in a lane: its name, when it begins in its step and how long it is, µs."""
    mine = frame[frame["lane"] == lane]
    starts = (mine["start_ns"] - mine["begin_ns"]) / US
    return list(zip(mine["name"], starts, mine["dur_ns"] / US, strict=True))


def test_the_middle_step_is_drawn_by_lane_and_category(tmp_path: Path) -> None:
    frame = runs.rank_of(tmp_path, traces.training(3)).once(excerpt)
    assert (set(frame["step"]), set(frame["shown"])) == ({1}, {"middle"})
    assert set(frame.loc[frame["lane"] == "computation 7", "category"]) == {"computation", "copy"}
    assert set(frame.loc[frame["lane"] == "communication 21", "category"]) == {"communication"}
    assert "sm90_gemm and 1 more" in {name for name, *_ in pieces(frame, "computation 7")}
    assert [(name, us) for name, _, us in pieces(frame, "thread")] == [("fetch", 100), ("optimizer", 80)]
    assert (frame["start_ns"] >= frame["begin_ns"]).all()
    with pytest.raises(NotMeasured):
        drawn(tmp_path / "no steps", traces.kernel("gemm", 0, MS))


def test_pieces_are_cut_named_by_the_longest_and_no_more_than_a_screen_shows(tmp_path: Path) -> None:
    both = (traces.step(1, 0, MS), traces.step(2, MS, MS))
    ran = [("early", 950, 150), ("short", 1_300, 40), ("long", 1_340, 60), ("shorter", 1_400, 20), ("alone", 1_700, 9)]
    frame = drawn(tmp_path / "a", *both, *(traces.kernel(name, at * US, us * US) for name, at, us in ran))
    told = [("early", 0, 100), ("long and 2 more", 300, 120), ("alone", 700, 9)]
    assert pieces(frame, "computation 7") == told
    kernels = [traces.kernel(f"k{n % 7}", n * 1_000, 900) for n in range(10_000)]
    assert len(drawn(tmp_path / "b", traces.step(1, 0, 10 * MS), *kernels)) < 700


def test_the_slowest_step_stands_beside_the_middle_one(tmp_path: Path) -> None:
    kernels = [traces.kernel("gemm", start * MS + 100, MS // 2) for start in (0, 1, 2)]
    frame = drawn(tmp_path, *(traces.step(n, n * MS, MS + (n == 2) * 200 * US) for n in range(3)), *kernels)
    columns = (frame[c] for c in ("shown", "step", "step_ns"))
    assert set(zip(*columns, strict=True)) == {("middle", 1, MS), ("slowest", 2, 1_200 * US)}


def test_streams_have_lanes_by_what_they_do_and_the_idlest_have_none(tmp_path: Path) -> None:
    events = (
        traces.copy(MS + 500_000, 100_000, 9, stream=22),
        traces.kernel("early", MS - 50_000, 60_000, stream=9),
        *(traces.kernel("gemm", MS + 100_000 + n * 200_000, 100_000 + n, stream=7) for n in range(4)),
        traces.collective(MS + 200_000, 400_000, 1_000, stream=20),  # part of which is hidden
        traces.kernel("elsewhere", MS + 10_000, 300_000, stream=7, device=1),
        *(traces.kernel("idler", MS + 10_000, 10_000 + n, stream=n) for n in (30, 31)),
    )
    in_order = sorted(events, key=lambda e: float(e["ts"]))
    frame = drawn(tmp_path, traces.step(1, 0, MS), traces.step(2, MS, MS), *in_order)
    assert list(frame["lane"].unique()) == ["computation 7", "computation 1:7", "communication 20", "copies 22"]
    assert frame["lane"].nunique() == MOST_STREAMS
    assert set(frame["step"]) == {2}
    assert [row[1:] for row in pieces(frame, "communication 20")] == [(200, 400)]


def test_loader_workers_have_lanes(tmp_path: Path) -> None:
    steps = [light(n, MS, traces.BASE_NS + n * MS) for n in range(3)]
    folder = runs.recorded(tmp_path, (traces.trace(traces.step(0, 0, MS), traces.step(1, MS, MS)), steps, runs.CPU))
    made = {"pid": 9, "count": 1, "collate_ns": -1, "cpu_ns": -1, "delay_ns": -1, "stored_bytes": -1, "read_bytes": -1}
    fetches = [
        made | {"worker": worker, "start_ns": traces.BASE_NS + MS + at, "dur_ns": MS // 2}
        for worker, at in ((0, -MS // 4), (1, MS // 4), (MOST_WORKERS, MS // 4), (1, 5 * MS))
    ]
    (folder / "ranks/00000/fetches.jsonl").write_text("".join(json.dumps(f) + "\n" for f in fetches))
    frame = runs.measured(folder, excerpt).frame(excerpt)
    mine = frame[(frame["category"] == "worker") & (frame["shown"] == "middle")]
    assert set(mine["lane"]) == {"worker 0", "worker 1"}
    assert [pieces(mine, f"worker {n}")[0][1:] for n in (0, 1)] == [(0, 250), (250, 500)]


def test_one_traced_step_that_was_held_up_says_nothing_of_the_others(tmp_path: Path) -> None:
    events, begin = list[Any](), 0
    traced = (10, 11, 25, 15, 29)
    for n, took in enumerate(traced):
        events += [traces.step(20 + n, begin, took * MS), traces.op("aten::mm", begin + MS, (took - 2) * MS)]
        begin += took * MS
    steps = [light(n, 10 * MS + n % 3 * 10_000) for n in range(60)]
    steps[20:25] = [light(20 + n, took * MS, profiled=1) for n, took in enumerate(traced)]
    path = runs.recorded(tmp_path / "run", (layers.on_cpu(*events), steps, runs.CPU))
    parts = runs.measured(path, breakdown).frame(breakdown).set_index("category")
    assert parts["ns"]["computation"] > 8 * MS
    assert parts["noise_ns"]["computation"] < 0.02 * parts["ns"]["computation"]
