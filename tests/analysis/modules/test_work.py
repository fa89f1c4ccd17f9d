"""What each module takes of a step, on hand-made traces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.modules.sums import GRAPH, OUTSIDE
from dlprof.analysis.modules.work import module_work
from dlprof.errors import NotMeasured
from tests.fixtures import layers, runs, traces
from tests.fixtures.traces import AUTOGRAD, MAIN


def work(tmp_path: Path, made: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, float]]:
    """Return the rows by path, class and part."""
    rows: list[dict[Any, Any]] = runs.rank_of(tmp_path, made).once(module_work).to_dict("records")
    return {(row.pop("path"), row.pop("kind"), row.pop("part")): row for row in rows}


def column(rows: dict[tuple[str, str, str], dict[str, float]], name: str) -> dict[tuple[str, str], float]:
    return {(path, part): row[name] for (path, _, part), row in rows.items()}


@pytest.mark.parametrize("tid", [MAIN, AUTOGRAD])
def test_a_step_on_a_cpu(tmp_path: Path, tid: int) -> None:
    rows = work(tmp_path, layers.on_cpu(layers.two_layers(tid)))
    waits = 0 if tid == MAIN else 220  # the training thread, for the other one
    assert column(rows, "host_ns") == {
        ("", "forward"): 50,
        ("a", "forward"): 200,
        ("b", "forward"): 100,
        ("b", "backward"): 60,
        ("a", "backward"): 150,
        (OUTSIDE, "backward"): 10,
        (OUTSIDE, "other"): 430,
    }
    exposed = column(rows, "exposed_ns")
    assert sum(exposed.values()) == 1_000
    assert exposed[OUTSIDE, "other"] == 430 + waits
    assert exposed["a", "forward"] == 200
    assert column(rows, "calls") == {
        ("", "forward"): 1,
        ("a", "forward"): 1,
        ("b", "forward"): 1,
        ("b", "backward"): 1,
        ("a", "backward"): 2,
        (OUTSIDE, "backward"): 1,
        (OUTSIDE, "other"): 1,
    }
    assert all(math.isnan(row["flops"]) and row["device_ns"] == 0 for row in rows.values())


def test_the_mean_of_several_steps(tmp_path: Path) -> None:
    events = [traces.step(n, 1_000 * n, 1_000) for n in range(4)]
    events += [layers.called("", "Net", 1_000 * n, 100 * (n + 1)) for n in range(4)]
    rows = work(tmp_path, layers.on_cpu(events))
    assert column(rows, "host_ns") == {("", "forward"): 250, (OUTSIDE, "other"): 750}
    assert column(rows, "calls") == {("", "forward"): 1, (OUTSIDE, "other"): 0}


def test_a_step_on_a_device(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, 10_000),
        layers.called("", "Net", 0, 1_000),
        layers.called("a", "Linear", 100, 300),
        layers.forward("addmm", 110, 200, 1),
        traces.call("cudaLaunchKernel", 150, 10, 1),
        traces.call("cudaMemcpyAsync", 700, 10, 2),
        layers.function("AddmmBackward0", 1_500, 500, 1, AUTOGRAD),
        traces.call("cudaLaunchKernel", 1_600, 10, 3, tid=AUTOGRAD),
        layers.accumulates(2_100, 500, AUTOGRAD),
        traces.call("cudaLaunchKernelExC", 2_250, 10, 4, tid=AUTOGRAD),
        traces.call("cudaGraphLaunch", 4_000, 10, 5),
        traces.kernel("forward", 1_000, 2_000, 1),
        traces.copy(2_500, 1_000, 4_096, correlation=2, stream=8),  # half of it beside the kernel
        traces.kernel("backward", 4_000, 1_000, 3),
        traces.collective(4_500, 2_000, 1_000, correlation=4),  # 500 of it beside the kernel
        traces.kernel("replayed", 7_000, 500, 5),
        traces.kernel("replayed too", 7_500, 500, 5),
    )
    rows = work(tmp_path, made)
    assert {key: row["device_ns"] for key, row in rows.items() if row["device_ns"]} == {
        ("a", "Linear", "forward"): 2_000,
        ("", "Net", "forward"): 1_000,
        ("a", "Linear", "backward"): 1_000,
        ("", "Net", "communication"): 2_000,
        (OUTSIDE, GRAPH, "other"): 1_000,
    }
    assert {key: row["exposed_ns"] for key, row in rows.items() if row["exposed_ns"]} == {
        ("a", "Linear", "forward"): 2_000,
        ("", "Net", "forward"): 500,
        ("a", "Linear", "backward"): 1_000,
        ("", "Net", "communication"): 1_500,
        (OUTSIDE, GRAPH, "other"): 1_000,
    }
    assert rows["", "Net", "forward"]["copied_bytes"] == 4_096
    assert rows["", "Net", "communication"]["calls"] == 1
    # The host: 1,000 in the model, 1,000 in functions of the backward pass, and the rest of the step.
    assert sum(row["host_ns"] for row in rows.values()) == 10_000


def test_an_exchange_on_a_cpu_costs_where_nothing_is_computed_beside_it(tmp_path: Path) -> None:
    made = layers.on_cpu(
        traces.step(0, 0, 1_000),
        layers.called("", "Net", 0, 200),
        layers.forward("addmm", 0, 200, 1),
        layers.function("AddmmBackward0", 300, 100, 1),
        traces.op("aten::mm", 300, 100),
        layers.accumulates(400, 50),
        traces.annotation("gloo:all_reduce", 410, 400),
        layers.function("AddmmBackward0", 500, 100, 1),
        traces.op("aten::mm", 500, 100),
    )
    exposed = column(work(tmp_path, made), "exposed_ns")
    assert sum(exposed.values()) == 1_000
    assert exposed["", "communication"] == pytest.approx(300, abs=50)
    assert exposed["", "backward"] == pytest.approx(200, abs=50)


def test_what_runs_in_no_step_does_not_count(tmp_path: Path) -> None:
    made = layers.on_cpu(traces.step(0, 0, 100), layers.called("", "Net", 50, 100), layers.called("", "Net", 200, 100))
    rows = work(tmp_path, made)
    assert column(rows, "host_ns") == {("", "forward"): 50, (OUTSIDE, "other"): 50}


def test_a_trace_without_modules_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="names no module"):
        work(tmp_path, traces.training())
