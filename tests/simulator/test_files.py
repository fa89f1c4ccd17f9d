"""What the simulator writes is what PyTorch's profiler and dlprof's recorder write, and agrees with the truth."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from simulator import folder
from simulator.faults.fault import small
from simulator.hardware import MS
from simulator.job import Gradients, Job, Pipeline, Recording
from simulator.kineto import FORMS
from simulator.machine import Simulation

FIRST = 12  # traced step


def jobs() -> dict[str, Job]:
    alone = small(1, 1.0)
    return {
        "alone": alone,
        "four": replace(alone, ranks=4, hosts=2, tensor=2, gradients=Gradients(buffers=True)),
        "fsdp": replace(alone, ranks=2, gradients=Gradients("fsdp")),
        "experts": replace(alone, ranks=2, experts=True),
        "pipeline": replace(
            alone, ranks=2, model=replace(alone.model, blocks=2), pipeline=Pipeline("1F1B", 4, (1, 1)), loader=None
        ),
        "replicas": replace(alone, devices=2),
    }


def written(tmp_path: Path, job: Job, **told: Any) -> tuple[Simulation, list[dict[str, Any]]]:
    """Return what ran, and each rank's trace."""
    simulation = folder.write(tmp_path / "run", job, Recording(steps=20, active=3, **told))
    paths = sorted((tmp_path / "run").rglob("*trace.json.gz"))
    # A float of so large a time is off by half a nanosecond and more.
    return simulation, [json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal) for path in paths]


def span(event: dict[str, Any]) -> tuple[int, int]:
    """Return when an event began and ended, ns."""
    start, dur = (int(event[name] * 1000) for name in ("ts", "dur"))
    return start, start + dur


def events(trace: dict[str, Any], *categories: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["cat"] in categories]


DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_a_trace_of_all_that_ran_in_its_window(form: str, tmp_path: Path) -> None:
    simulation, [trace, _] = written(tmp_path, jobs()["fsdp"], form=form)
    rank = simulation.ranks[0]
    launched = [w for works in rank.work.values() for w in works if FIRST <= w.step < FIRST + 3]
    expected = Counter(w.kind for w in launched if w.kind in ("kernel", "communication", "copy", "set"))
    assert len(events(trace, *DEVICE)) == sum(expected.values())
    told = sum(float(e["dur"]) for e in events(trace, "kernel"))
    true = sum(w.end - w.start for w in launched if w.kind in ("kernel", "communication")) / 1000
    assert told == pytest.approx(true, abs=1.0 * len(launched))
    steps = [e["name"] for e in events(trace, "user_annotation") if e["name"].startswith("ProfilerStep")]
    assert steps == [f"ProfilerStep#{n}" for n in range(FIRST, FIRST + 3)]


@pytest.mark.parametrize("name", jobs())
def test_each_piece_of_work_has_one_call_that_began_before_it(name: str, tmp_path: Path) -> None:
    _, traces = written(tmp_path, jobs()[name], form="torch-2.13")
    for trace in traces:
        calls = {e["args"]["correlation"]: e for e in events(trace, "cuda_runtime")}
        assert len(calls) == len(events(trace, "cuda_runtime"))
        work = events(trace, *DEVICE)
        assert len(work) > 50
        for e in work:
            assert calls[e["args"]["correlation"]]["ts"] < e["ts"]
        assert len({e["args"]["correlation"] for e in work}) == len(work)


@pytest.mark.parametrize("name", jobs())
def test_ranges_of_a_thread_are_nested_and_work_of_a_stream_is_not(name: str, tmp_path: Path) -> None:
    _, traces = written(tmp_path, jobs()[name], form="torch-2.8")
    for trace in traces:
        lanes: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for e in events(trace, "cpu_op", "user_annotation", "cuda_runtime"):
            lanes[e["tid"]].append(span(e))
        assert len(lanes) == 2
        for spans in lanes.values():
            open_: list[int] = []
            for start, end in sorted(spans, key=lambda one: (one[0], -one[1])):
                while open_ and open_[-1] <= start:
                    open_.pop()
                assert not open_ or end <= open_[-1]
                open_.append(end)
        streams: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for e in events(trace, *DEVICE):
            streams[e["pid"], e["tid"]].append(span(e))
        for spans in streams.values():
            spans.sort()
            assert all(b[0] >= a[1] for a, b in itertools.pairwise(spans))


def test_collectives_tell_their_group_and_number_and_end_together(tmp_path: Path) -> None:
    offsets = (0, 7 * MS)
    job = jobs()["four"]
    _, traces = written(tmp_path, job, form="torch-2.13", clock_offsets=offsets)
    ends: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, trace in enumerate(traces):
        assert trace["distributedInfo"]["rank"] == rank
        for e in events(trace, "kernel"):
            if "Comms Id" in e["args"]:
                assert rank in json.loads(e["args"]["Process Group Ranks"])
                at = span(e)[1] - offsets[job.host_of(rank)]
                assert rank not in ends[e["args"]["Comms Id"]]
                ends[e["args"]["Comms Id"]][rank] = at
    assert len(ends) > 30
    for same in ends.values():
        assert len(same) in (2, 4)
        # The clocks of the hosts differ by 7 ms, the ends by what ranks notice them late.
        assert max(same.values()) - min(same.values()) < 10_000
    groups = {e["args"].get("Process Group Name") for e in events(traces[0], "kernel")}
    assert len(groups - {None}) >= 2


def test_the_light_layer_tells_every_step(tmp_path: Path) -> None:
    simulation, _ = written(tmp_path, jobs()["alone"], device_step=True)
    at = tmp_path / "run" / "ranks" / "00000"
    rows = [json.loads(line) for line in (at / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(20))
    for row, after in itertools.pairwise(rows):
        assert row["start_ns"] + row["dur_ns"] == after["start_ns"]
        parts = sum(row[f"{part}_ns"] for part in ("fetch", "forward", "backward", "optimizer"))
        assert parts <= row["dur_ns"]
    # From end to end on the device's clock: they add up to the whole.
    ended = [row.ended.end for row in simulation.ranks[0].records.rows if row.ended is not None]
    assert sum(row["device_step_ns"] for row in rows[1:]) == pytest.approx(ended[-1] - ended[0], abs=20_000)
    assert rows[0]["device_step_ns"] == -1
    assert {row["step"] for row in rows if row["profiled"]} == {10, 11, 12, 13, 14, 15, 16}
    facts = json.loads((at / "facts.json").read_text())
    assert facts["window"]["first_step"] == FIRST
    assert facts["flops"]["total"] == sum(o["flops"] for o in facts["flops"]["operators"])
