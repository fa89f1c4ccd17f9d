"""What could hide communication: exact on made steps, and silent where the run does not show it."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.exchange_plans import exchange_plans
from dlprof.analysis.communication.overlap import (
    activations,
    exposed_transfer,
    free_to_hide,
    gradients,
    idle_cores,
    overlap,
)
from dlprof.analysis.engine import Measured
from tests.fixtures import runs, traces
from tests.fixtures.exchanges import DDP, US, gains, gpu_step, in_both_passes, planned
from tests.fixtures.runs import MS


def test_only_what_the_backward_pass_computes_beside_nothing_can_hide_more(tmp_path: Path) -> None:
    # Of 3 ms of backward 1 ms is beside the first exchange, and 4 ms of the others lie open.
    run = planned(tmp_path, gpu_step((4_010 * US, 2 * MS, 1_000), (6_010 * US, 3 * MS, 1_000)), ddp=DDP)
    assert run.frame(free_to_hide) == pytest.approx({0: 2 * MS, 1: 2 * MS})
    assert run.frame(exposed_transfer).tolist() == [4 * MS, 4 * MS]
    assert gains(run)["hidden"] == pytest.approx(2 * MS)


@pytest.mark.parametrize(
    ("fetch", "used", "transfer"),
    [
        (0, None, 4 * MS),  # as the traced ranks have
        (9 * MS, None, MS),
        (0, 10 * MS, 0),  # its thread never stands still: the others wait for it
        (0, 7 * MS, 3 * MS),
        (2 * MS, 7 * MS, MS),
    ],
)
def test_a_rank_without_a_trace_exchanges_for_no_longer_than_it_may(
    fetch: int, used: int | None, transfer: int, tmp_path: Path
) -> None:
    run = on_two_cores(tmp_path, 6 * MS, used or 6 * MS, 6 * MS).job.run.path
    of_log = [runs.light(n, 10 * MS, fetch_ns=fetch, profiled=int(n < 3)) for n in range(40)]
    (run / "ranks/00001/steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in of_log))
    if used is None:
        (run / "ranks/00001/loading.jsonl").unlink()
    told = json.loads((run / "ranks/00001/facts.json").read_text())
    for rank in range(3):
        one_thread = told | {"rank": rank, "cpu": {"affinity": 2, "torch_threads": 1}}
        (run / f"ranks/{rank:05d}/facts.json").write_text(json.dumps(one_thread))
    runs.asked_for_none(run / "ranks/00001", "0,last")
    found = runs.measured(run, exposed_transfer).frame(exposed_transfer)
    assert found.tolist() == pytest.approx([transfer] * 3, abs=MS / 100)


def test_a_sharded_models_forward_pass_hides_too(tmp_path: Path) -> None:
    run = planned(tmp_path, gpu_step((4_010 * US, 2 * MS, 1_000), (6_010 * US, 3 * MS, 1_000)), fsdp=True)
    assert gains(run)["hidden"] == pytest.approx(4 * MS)


def test_where_nothing_tells_the_backward_pass_all_computation_counts(tmp_path: Path) -> None:
    events = [e for e in gpu_step((5_010 * US, 4 * MS, 1_000)) if e["cat"] != "cuda_runtime"]
    assert planned(tmp_path, events).frame(free_to_hide) == pytest.approx({0: 5 * MS, 1: 5 * MS})


def on_two_cores(folder: Path, *cpu: int, cores: int = 2) -> Measured:
    """Record ranks on a CPU that compute 6 ms and reduce for 4 ms after it, and use so many ns of CPU time a step."""
    facts = {**runs.CPU, "backend": "gloo", "cpu": {"affinity": cores}, "models": [{"parameters": 1, "ddp": DDP}]}
    made, ranks = [], len(cpu)
    for rank in range(ranks):
        events: list[Any] = []
        for n in range(3):
            zero = n * 1_000 * MS
            events.append(traces.step(n, zero, 10 * MS))
            events.append(traces.op("aten::mm", zero, 6 * MS))
            events.append(traces.annotation("gloo:all_reduce", zero + 6 * MS, 4 * MS))
        made.append(traces.trace(*events, rank=rank, world_size=ranks, device="", backend="gloo"))
    steps = [runs.light(n, 10 * MS, profiled=int(n < 3)) for n in range(40)]
    path = runs.recorded(folder / "run", *((one, steps, facts) for one in made))
    for rank, used in enumerate(cpu):
        rows = [
            {"kind": "usage", "start_ns": s["start_ns"], "dur_ns": s["dur_ns"], "count": 1, "step": s["step"]}
            | {"cpu_ns": used, "delay_ns": 0, "thread_ns": used}
            for s in steps
        ]
        (path / f"ranks/{rank:05d}/loading.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return runs.measured(path, exchange_plans, overlap)


def test_on_a_cpu_no_more_is_hidden_than_its_cores_stand_idle(tmp_path: Path) -> None:
    # Two ranks use 1.7 of two cores: beside each other, computing and sending take 8.5 ms of 10.
    run = on_two_cores(tmp_path, 9 * MS, 8 * MS)
    assert run.frame(idle_cores) == pytest.approx(1.5 * MS)
    assert gains(run)["hidden"] == pytest.approx(1.5 * MS)
    why = run.frame(exchange_plans).set_index("key")["why"]["hidden"]
    assert "they stand idle for 1.50 ms" in why


def test_with_cores_to_spare_all_of_it_may_be_hidden(tmp_path: Path) -> None:
    assert gains(on_two_cores(tmp_path, 9 * MS, 8 * MS, cores=8))["hidden"] == pytest.approx(4 * MS)


def test_ranks_with_a_core_each_have_their_own(tmp_path: Path) -> None:
    assert on_two_cores(tmp_path, 9 * MS, 8 * MS, cores=1).frame(idle_cores) == pytest.approx(1 * MS)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", ["all_reduce", "all_to_all"])
def test_what_the_forward_pass_exchanges_is_no_gradient(tmp_path: Path, name: str, gpu: bool) -> None:
    run = runs.measured(in_both_passes(tmp_path, gpu, name=name), exchange_plans)
    assert run.frame(activations) == name
    assert run.frame(gradients).empty
    assert set(gains(run)) == {"hidden"}
    assert "needed at once" in run.frame(exchange_plans)["why"].iloc[0]


def test_gradients_are_told_by_their_size_from_what_a_forward_pass_exchanges(tmp_path: Path) -> None:
    run = runs.measured(in_both_passes(tmp_path, True, gradients=2 * MS), exchange_plans)
    # Of 4 ms that lie open 2 ms are gradients: half as many save 1 ms.
    assert gains(run)["half"] == pytest.approx(1 * MS)
    assert run.frame(activations) == ""


def test_without_sizes_ddps_exchanges_are_gradients(tmp_path: Path) -> None:
    run = runs.measured(in_both_passes(tmp_path, False, ddp=DDP), exchange_plans)
    assert run.frame(activations) == ""
    assert "half" in gains(run)


@pytest.mark.parametrize("model", [{}, {"ddp": DDP}, {"fsdp": True}])
def test_what_the_backward_pass_reduces_for_what_was_gathered_is_no_gradient(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    # As layers that are parallel by columns alone do.
    run = runs.measured(in_both_passes(tmp_path, False, name="all_gather", back="all_reduce", **model), exchange_plans)
    assert ("half" in gains(run)) == bool(model)
