"""What the simulator writes has the structure and the profiler's costs of real recordings of one H200.

The recordings are not part of this project: without them these tests skip.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from simulator import folder
from simulator.faults import FAULTS
from simulator.job import Job, Recording
from tests.fixtures.places import TRACES

RECORDED = TRACES / "h200"
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
PHASES = ("forward", "backward", "optimizer")
SEED = 3  # of a short job

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not RECORDED.is_dir(), reason="the reference traces are not here (../shared/traces)"),
]


@dataclass(frozen=True)
class Run:
    """What a rank left: host events of its trace in order of time, the longer first, rows of its logs, its facts.

    Times are ns.
    """

    events: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    loading: list[dict[str, Any]]
    fetches: list[dict[str, Any]]
    facts: dict[str, Any]

    @property
    def window(self) -> range:
        told = self.facts["window"]
        return range(told["first_step"], told["last_step"] + 1)


def opened(run: Path) -> Run:
    at = run / "ranks" / "00000"
    events = json.loads(gzip.decompress((at / "trace.json.gz").read_bytes()))["traceEvents"]
    host = [e for e in events if e.get("ph") == "X" and e["cat"] in HOST]
    for event in host:
        event["ts"], event["dur"] = round(1e3 * event["ts"]), round(1e3 * event["dur"])
    rows = {
        name: [json.loads(line) for line in (at / f"{name}.jsonl").read_text().splitlines()]
        for name in ("steps", "loading", "fetches")
        if (at / f"{name}.jsonl").is_file()
    }
    return Run(
        sorted(host, key=lambda e: (e["ts"], -e["dur"])),
        rows["steps"], rows.get("loading", []), rows.get("fetches", []),
        json.loads((at / "facts.json").read_text()),
    )  # fmt: skip


@cache
def real(name: str) -> Run:
    return opened(RECORDED / name)


@cache
def simulated(name: str, event: int | None = None) -> Run:
    fault = next(f for f in FAULTS if f.name == name)
    job = fault.make(SEED)
    how = replace(fault.record(job), steps=70)
    return written(job, how if event is None else replace(how, event=event))


def written(job: Job, how: Recording) -> Run:
    with TemporaryDirectory() as at:
        folder.write(Path(at) / "run", job, how)
        return opened(Path(at) / "run")


def paths(run: Run) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Return each host event with the names around it on its thread, from the outermost in, its own last."""
    open_: dict[Any, list[tuple[int, str]]] = {}
    for event in run.events:
        stack = open_.setdefault(event["tid"], [])
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        stack.append((event["ts"] + event["dur"], event["name"]))
        yield event, tuple(name for _, name in stack)


def below(run: Run, root: str) -> set[tuple[str, ...]]:
    """Return the chains of names from operators of a name down to their calls."""
    found = set()
    for event, path in paths(run):
        if root in path and event["cat"] == "cuda_runtime":
            found.add(path[path.index(root) :])
    return found


@pytest.mark.parametrize(
    ("name", "recording", "root"),
    [
        ("norm_items", "g06_grad_norm_items", "aten::item"),
        ("norm_items", "g06_grad_norm_items", "aten::linalg_vector_norm"),
        ("optimizer_loop", "g04_optimizer_loop", "aten::addcdiv_"),
        ("optimizer_loop", "g04_optimizer_loop", "aten::sqrt"),
        ("optimizer_loop", "g04_optimizer_loop", "aten::item"),  # of a count on the host: it calls nothing
    ],
)
def test_an_operator_calls_what_it_did_when_it_was_recorded(name: str, recording: str, root: str) -> None:
    one, other = below(simulated(name), root), below(real(recording), root)
    assert one <= other
    assert bool(one) == bool(other)


# -- what the profiler costs


def slowed(run: Run) -> Iterator[tuple[str, float, float, float]]:
    """Return each phase, its events and ranges of modules in a traced step, and what it is longer than untraced, ns."""
    starts = [(e["ts"], e["name"].startswith("nn.Module")) for e in run.events]
    times = [at for at, _ in starts]
    untraced = [row for row in run.steps[22:-1] if not row["profiled"]]
    for phase in PHASES:
        ranges = [(e["ts"], e["ts"] + e["dur"]) for e in run.events if e["name"] == f"dlprof::{phase}"]
        held = [starts[bisect_right(times, a) : bisect_left(times, b)] for a, b in ranges]
        modules = mean(sum(is_module for _, is_module in events) for events in held)
        took = median(b - a for a, b in ranges)
        longer = took - median(row[f"{phase}_ns"] for row in untraced)
        yield phase, mean(map(len, held)) - modules, modules, longer


@pytest.mark.parametrize("event", [600, 2_300])
@pytest.mark.parametrize("name", ["optimizer_loop", "laps"])
def test_a_traced_phase_is_longer_by_a_constant_for_each_event(name: str, event: int) -> None:
    run = simulated(name, event)
    for phase, events, modules, longer in slowed(run):
        expected = events * event + modules * 900
        # Host times of single steps differ by 2 %.
        noise = 0.03 * median(row[f"{phase}_ns"] for row in run.steps[22:-1] if not row["profiled"])
        assert longer == pytest.approx(expected, rel=0.05, abs=noise + 5_000), phase
    assert run.facts["window"]["modules"] == {"ranges": round(modules_of(run)), "ns_each": 900}


def modules_of(run: Run) -> int:
    return sum(e["name"].startswith("nn.Module") for e in run.events)
