"""Faults of the script and of its loader: what their fixes gain, which line they stand in, what py-spy sees."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from simulator import folder, script
from simulator.faults import FAULTS, FILES
from simulator.faults.fault import Fault, step_of
from simulator.job import Job
from simulator.play import Truth, play, true

CHOSEN = {f.name: f for f in FAULTS if FILES[f.name] in ("host", "loading")}
COSTLY = [name for name, f in CHOSEN.items() if not f.harmless]
SEED = 3  # of short jobs

# No single line of the script makes these slow.
NO_LINE = {
    "cache_emptied", "checkpoints", "exposed_copy", "garbage", "graph_waits", "host_function", "many_launches",
    "recompiles", "restarted_workers", "slow_loader_one_rank", "slow_worker", "tiny_kernels", "waits_for_stream",
}  # fmt: skip



def of(fault: Fault, job: Job) -> Truth:
    bursts = fault.steps > 60  # where batches come in bursts a mean needs many of them
    return true(job, fault.warm, fault.steps if bursts else 20)




@pytest.mark.parametrize("name", COSTLY)
def test_a_fault_stands_in_a_line_or_in_none(name: str) -> None:
    assert bool(CHOSEN[name].line) != (name in NO_LINE)




# What sets the pace of the fixed job where another thing does than its device and its host: ns of a step.
def _workers(job: Job) -> float:
    assert job.loader is not None
    return job.loader.fetch / job.loader.workers


def _pinning(job: Job) -> float:
    assert job.loader is not None
    return job.loader.pin


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fixed", "pace"),
    [
        ("wait_then_loader", True, _workers),
        ("prefetch_used_up", False, _workers),
        ("pinning_limits", False, _pinning),
        ("pinning_as_long", True, _pinning),
        ("hidden_pinning", True, step_of),
        ("workers_keep_up", False, step_of),
        ("hidden_bookkeeping", False, step_of),
    ],
)
def test_what_comes_next_sets_the_pace(name: str, fixed: bool, pace: Callable[[Job], float]) -> None:
    fault = CHOSEN[name]
    job = fault.make(SEED)
    job = fault.fix(job) if fixed else job
    # A device takes some per cent more than its kernels: gaps, the copy of the batch, the optimizer. And workers whose
    # batches take now longer and now shorter are some per cent slower than the mean of them: batches come in order.
    assert pace(job) * 0.99 < of(fault, job).period_ns < pace(job) * (1.15 if pace is step_of else 1.06)


def test_the_window_of_a_job_whose_prefetch_is_used_up_waits_for_no_batch() -> None:
    fault = CHOSEN["prefetch_used_up"]
    for seed in range(4):
        job = fault.make(seed)
        how = fault.record(job)
        rows = play(job, how.steps).ranks[0].records.rows
        first = how.skip + how.warmup
        assert job.loader is not None
        waits = [row.fetch - job.loader.receive for row in rows]
        assert sum(waits[1 : first + how.active]) < 0.02 * step_of(job)
        assert mean(waits[fault.warm :]) > 0.2 * step_of(job)


def test_each_loop_alone_and_all_together_gain_what_adds_up() -> None:
    """A job that three loops hold up: their gains, one after the other, are that of all of them."""
    job = CHOSEN["loops_optimizer"].make(SEED)
    fixes = [CHOSEN[name].fix for name in ("loops_optimizer", "norm_items", "average_loop")]
    periods = [true(job, steps=20).period_ns]
    for fix in fixes:
        job = fix(job)
        periods.append(true(job, steps=20).period_ns)
    assert periods == sorted(periods, reverse=True)
    assert periods[-1] < 0.5 * periods[0]


def test_launches_of_loops_are_one_for_each_parameter_and_operator() -> None:
    one = CHOSEN["loops_optimizer"].make(SEED)
    tensors = one.model.tensors
    assert 50 <= tensors <= 300
    kernels = true(one, steps=10).ranks[0].kernels
    fused, norms, averages = (
        kernels - true(CHOSEN[name].fix(one), steps=10).ranks[0].kernels
        for name in ("loops_optimizer", "norm_items", "average_loop")
    )
    few = -(-tensors // 36) + 2  # of all together
    assert fused == pytest.approx(8 * tensors, abs=few)
    assert norms == pytest.approx(tensors, abs=few)
    assert averages == pytest.approx(2 * tensors, abs=few)


def test_a_cell_by_hand_launches_for_each_time_step_and_the_librarys_for_all() -> None:
    fault = CHOSEN["written_cell"]
    job = fault.make(SEED)
    by_hand, library = (true(one, steps=10).ranks[0].kernels for one in (job, fault.fix(job)))
    # 12 forward, and 20 backward in which a gradient is summed once more than the first time step needs.
    assert by_hand / job.model.times == pytest.approx(32, abs=4)
    assert library < 30


# -- the script


@pytest.mark.parametrize("name", [name for name in COSTLY if CHOSEN[name].line])
def test_a_fault_stands_in_a_line_that_its_fix_changes(name: str) -> None:
    fault = CHOSEN[name]
    job = fault.make(SEED)
    line = script.lines(job)[script.number(job, fault.line) - 1].text
    # What changes is in the model, the data set, or a function of the script.
    unchanged = {"written_cell", "launches_left", "bookkeeping", "pinning_limits", "slow_python"}
    if name not in unchanged:
        assert line not in [one.text for one in script.lines(fault.fix(job))]


# How the text of a call of a kind begins.
BEGINS = {
    "loader": "torch.utils.data.DataLoader(", "optimizer": "torch.optim.AdamW(", "autocast": "torch.autocast(",
    "forward": "model(", "loss": "F.cross_entropy(", "backward": "loss.backward(", "optimizer_step": "opt.step(",
    "copy": "x.to(",
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_each_recorded_call_is_in_its_line(name: str) -> None:
    job = CHOSEN[name].make(SEED)
    text = [line.text for line in script.lines(job)]
    for call in script.calls(job, 60):
        source = text[call["line"] - 1]
        assert call["source"] == source.strip()
        if call["kind"] != "iteration":
            made = source[call["column"] : call["end_column"]]
            assert made.endswith((")", "]"))
            assert made.startswith(BEGINS.get(call["kind"], made.strip()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "frame"),
    [("norm_items", "grad_norm"), ("average_loop", "average"), ("bookkeeping", "bookkeeping"), ("laps", "lap")],
)
def test_stacks_are_seen_in_lines_as_long_as_they_take(name: str, frame: str, tmp_path: Path) -> None:
    fault = CHOSEN[name]
    job = fault.make(SEED)
    ran = folder.write(tmp_path / "run", job, replace(fault.record(job), steps=200))
    text = gzip.decompress((tmp_path / "run" / "ranks" / "00000" / "stacks.txt.gz").read_bytes()).decode()
    head, *rows = text.splitlines()
    burst = json.loads(head[1:])
    seen: Counter[bool] = Counter()
    for row in rows:
        stack, _, times = row.rpartition(" ")
        if stack.count("process ") == 1 and "MainThread" in stack:
            seen[f";{frame} (/home/user/train.py:{script.number(job, fault.line)})" in stack] += int(times)
    assert burst["rate"] == 47
    records = ran.ranks[0].records
    ends = [at for at, _ in records.lines[1:]] + [records.rows[-1].end]
    names = {
        line
        for line in {name for _, name in records.lines}
        if frame in script.frames(job, line)[-1] or any(f"{frame} (" in f for f in script.frames(job, line))
    }
    begin, end = records.rows[0].end, records.rows[0].end + burst["end_ns"] - burst["start_ns"]
    inside = sum(
        max(min(until, end) - max(at, begin), 0)
        for (at, line), until in zip(records.lines, ends, strict=True)
        if line in names
    )
    share, n = inside / (end - begin), seen.total()
    assert n > 40
    # Three standard deviations of so many samples, and what the profiler's own time takes of the burst.
    assert seen[True] / n == pytest.approx(share, abs=3 * (share * (1 - share) / n) ** 0.5 + 0.05)


@pytest.mark.long
def test_stacks_of_workers_and_of_the_pinning_thread_tell_when_they_work(tmp_path: Path) -> None:
    job = CHOSEN["pinning_limits"].make(SEED)
    ran = folder.write(tmp_path / "run", job, replace(CHOSEN["pinning_limits"].record(job), steps=100))
    text = gzip.decompress((tmp_path / "run" / "ranks" / "00000" / "stacks.txt.gz").read_bytes()).decode()
    pins: Counter[bool] = Counter()
    for row in text.splitlines():
        if "_pin_memory_loop" in row:
            pins["pin_memory (" in row] += int(row.rpartition(" ")[2])
    queue = ran.ranks[0].queue
    assert queue is not None
    assert pins[True] > 0.9 * pins.total()
    assert sum("Texts.__getitem__" in row for row in text.splitlines()) == job.loader.workers  # type: ignore[union-attr]
