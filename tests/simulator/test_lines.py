"""Faults of the script and of its loader: what their fixes gain, which line they stand in, what py-spy sees."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from simulator import folder, script
from simulator.faults import FAULTS, FILES
from simulator.faults.fault import Fault, step_of
from simulator.job import Job
from simulator.play import Truth, true

CHOSEN = {f.name: f for f in FAULTS if FILES[f.name] in ("host", "loading")}
COSTLY = [name for name, f in CHOSEN.items() if not f.harmless]
SEED = 3  # of short jobs


def of(fault: Fault, job: Job) -> Truth:
    bursts = fault.steps > 60  # where batches come in bursts a mean needs many of them
    return true(job, fault.warm, fault.steps if bursts else 20)


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
