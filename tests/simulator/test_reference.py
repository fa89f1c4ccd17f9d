"""The simulated machine does what a real one did: a job's host steps follow from what its first step launched.

The trace is of a ResNet on a V100, whose host runs ahead until its queue is full. It was recorded by others and is not
part of this project: without it this test skips.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest

from simulator.hardware import V100, Host
from simulator.machine import Setup, simulate
from simulator.program import Instruction, Kernel, Operator, Record, Spend, Step
from tests.fixtures.places import TRACES

TRACE = TRACES / "gpu_async" / "v100_ns.json.gz"

pytestmark = pytest.mark.skipif(not TRACE.is_file(), reason="the reference traces are not here (../shared/traces)")


def test_host_steps_follow_from_the_first_one() -> None:
    """The first step fills the queue: its calls take what they take, and its kernels are as long as in every step."""
    events = [e for e in json.loads(gzip.decompress(TRACE.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    steps = sorted(
        (e for e in events if e["name"].startswith("ProfilerStep") and e["cat"] == "user_annotation"),
        key=lambda e: e["ts"],
    )
    program = tuple(_program(events, steps[0]))
    made = simulate(
        Setup(
            lambda rank, number: Step(program),  # noqa: ARG005
            steps=len(steps) + 1,
            device=replace(V100, jitter=0.0, step_jitter=0.0),
            host=Host(jitter=0.0, step_jitter=0.0, launch=0, event_call=0),
        )
    )
    rows = made.ranks[0].records.rows
    simulated = [(row.end - row.start) / 1e6 for row in rows[: len(steps)]]
    assert simulated == pytest.approx([step["dur"] / 1e3 for step in steps], rel=0.005)


def _program(events: list[dict[str, Any]], step: dict[str, Any]) -> list[Instruction]:
    """Return what a step did: each call with the host's time before it, and the work that it launched."""
    begin, end = step["ts"], step["ts"] + step["dur"]
    work = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    calls = sorted(
        (e for e in events if e.get("cat") == "cuda_runtime" and begin <= e["ts"] < end), key=lambda e: e["ts"]
    )
    made: list[Instruction] = []
    for call in calls:
        until = call["ts"] + call["dur"]
        ns = max(round((until - begin) * 1000), 0)
        launched = work.get(call["args"]["correlation"])
        begin = until
        if launched is not None:
            made.append(Operator((), (Kernel("kernel", round(launched["dur"] * 1000)),), 0, ns, 0))
        else:
            made.append(Spend(ns))
            if call["name"] == "cudaEventRecord":
                made.append(Record("event"))
    return [*made, Spend(max(round((end - begin) * 1000), 0))]
