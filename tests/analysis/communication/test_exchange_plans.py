"""Plans of exchanging otherwise: exact on made steps, and silent where the run does not tell."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.exchange_plans import (
    activations,
    exchange_plans,
    exposed_transfer,
    fitted,
    free_to_hide,
    idle_cores,
    overlap,
)
from dlprof.analysis.communication.rules import exposed_communication
from dlprof.analysis.engine import Measured
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

US = 1_000
DDP = {"bucket_cap_mb": 1.0, "find_unused_parameters": False}


def step(
    *reduced: tuple[int, int, int], forward: int = 2 * MS, backward: int = 3 * MS, period: int = 10 * MS
) -> list[Any]:
    """Return step of one rank: a forward and a backward kernel, and all-reduces of (start, length, float32 numbers)."""
    events: list[Any] = [traces.step(0, 0, period)]
    events += traces.launched("gemm", 0, 10 * US, forward, 1)
    call = traces.call("cudaLaunchKernel", 20 * US, 5 * US, 2, tid=traces.AUTOGRAD)
    events += [call, traces.kernel("gemm_backward", 10 * US + forward, backward, 2)]
    return events + [traces.collective(start, dur, elements) for start, dur, elements in reduced]


def run_of(folder: Path, events: list[Any], **model: Any) -> Measured:
    facts = {"device": {"type": "cuda"}, "host": "node-1", "models": [{"parameters": 1, **model}]}
    made: list[Any] = [(traces.trace(*events, rank=r), [], facts) for r in range(2)]
    return runs.measured(runs.recorded(folder / "run", *made), exchange_plans, overlap)


def gains(run: Measured) -> dict[str, float]:
    return dict(run.frame(exchange_plans)[["key", "gain_ns"]].to_numpy())


def test_only_what_the_backward_pass_computes_beside_nothing_can_hide_more(tmp_path: Path) -> None:
    # Of 3 ms of backward 1 ms is beside the first exchange, and 4 ms of the others lie open.
    run = run_of(tmp_path, step((4_010 * US, 2 * MS, 1_000), (6_010 * US, 3 * MS, 1_000)), ddp=DDP)
    assert run.frame(free_to_hide) == pytest.approx({0: 2 * MS, 1: 2 * MS})
    assert run.frame(exposed_transfer).tolist() == [4 * MS, 4 * MS]
    assert gains(run)["hidden"] == pytest.approx(2 * MS)


def test_a_sharded_models_forward_pass_hides_too(tmp_path: Path) -> None:
    run = run_of(tmp_path, step((4_010 * US, 2 * MS, 1_000), (6_010 * US, 3 * MS, 1_000)), fsdp=True)
    assert gains(run)["hidden"] == pytest.approx(4 * MS)


def test_where_nothing_tells_the_backward_pass_all_computation_counts(tmp_path: Path) -> None:
    events = [e for e in step((5_010 * US, 4 * MS, 1_000)) if e["cat"] != "cuda_runtime"]
    assert run_of(tmp_path, events).frame(free_to_hide) == pytest.approx({0: 5 * MS, 1: 5 * MS})


def sizes(*, small: int, large: int) -> list[tuple[int, int, int]]:
    """Return three small and three large all-reduces after backward pass: 100 µs to start, 1 µs for 10,000 bytes."""
    found, at = [], 5_010 * US
    for elements in (small, large) * 3:
        dur = 100 * US + elements * 4 // 10
        found.append((at, dur, elements))
        at += dur
    return found


def test_two_classes_of_size_tell_starting_from_moving(tmp_path: Path) -> None:
    run = run_of(tmp_path, step(*sizes(small=25_000, large=2_500_000)), ddp=DDP)
    fit = run.frame(fitted)
    assert fit is not None
    assert (fit.start_ns, fit.byte_ns) == pytest.approx((100 * US, 0.1))
    # 30.3 MB move in 3.03 ms and six exchanges start in 0.6 ms. Half the bytes take 1.515 ms less.
    assert run.frame(exposed_transfer).tolist() == pytest.approx([3.63 * MS] * 2)
    assert gains(run)["bytes"] == pytest.approx(1.515 * MS)
    assert gains(run)["half"] == pytest.approx(1.815 * MS)
    # In 5 MB six remain. In 10 MB it is three: 3.33 ms, of which 1.33 do not fit beside 2 of 3 ms of backward;
    # with six 3.63 ms, 1.13 of them beyond 2.5 ms. 1 MB makes 29, and starting them costs more than they hide.
    assert gains(run)["bucket"] == pytest.approx(0.0, abs=1)


def small_buckets(pairs: int = 20) -> list[Any]:
    reduced, at = [], 5_010 * US
    for elements in (250, 25_000) * pairs:
        reduced.append((at, 100 * US + elements * 4 // 10, elements))
        at += reduced[-1][1]
    return step(*reduced, period=round(at / MS + 3) * MS)


def test_small_buckets_that_mostly_start_become_few(tmp_path: Path) -> None:
    plans = run_of(tmp_path, small_buckets(), ddp=DDP).frame(exchange_plans).set_index("key")
    plan = plans.loc["bucket"]
    assert plans["bucket_cap_mb"].dropna().to_dict() == {"bucket": 1.0}
    # Forty exchanges of 2.02 MB take 4.202 ms: 1.277 ms more than 39/40 of 3 ms. Two take 0.402 ms, half of it open.
    assert plan["change"] == "`bucket_cap_mb=1` (is 1)"
    assert plan["gain_ns"] == pytest.approx(1.277 * MS - 0.201 * MS, rel=1e-3)


@pytest.mark.parametrize("now", [0.01, 1.0])
def test_the_rule_names_the_buckets_of_the_best_plan_unless_they_are_there(tmp_path: Path, now: float) -> None:
    run_of(tmp_path, small_buckets(100), ddp=DDP | {"bucket_cap_mb": now})
    found = ask(exposed_communication.RULE, tmp_path / "run")
    named = [s for c in found.changes for s in c.settings if s.name == "bucket_cap_mb"]
    plans = gains(run_of(tmp_path / "again", small_buckets(100), ddp=DDP))
    assert max(plans, key=lambda key: plans[key]) == "bucket"
    assert plans["bucket"] == pytest.approx(found.saving_ns)
    if now == 1.0:
        assert (found.forecasts, named[0].to) == ((), 25.0)
    else:
        assert (named, [f.value for f in found.forecasts]) == ([Setting("bucket_cap_mb", now, 1.0)], ["1.0"])


def test_exchanges_that_are_alike_do_not_tell_what_starting_takes(tmp_path: Path) -> None:
    run = run_of(tmp_path, step(*sizes(small=25_000, large=25_000)), ddp=DDP)
    assert run.frame(fitted) is None
    plans = run.frame(exchange_plans).set_index("key")
    assert plans["gain_ns"][["bucket", "bytes", "powersgd"]].isna().all()
    assert "alike" in plans["why"]["bucket"]
    assert plans["gain_ns"]["half"] == pytest.approx(run.frame(exposed_transfer)[0] / 2)


def test_large_exchanges_take_half_as_long_for_half_the_bytes(tmp_path: Path) -> None:
    run = run_of(tmp_path, step((5_010 * US, 4 * MS, 10_000_000)), ddp=DDP)
    assert gains(run)["bytes"] == pytest.approx(2 * MS)


def test_sixteen_bits_are_not_offered_to_who_has_them(tmp_path: Path) -> None:
    events = step((5_010 * US, 4 * MS, 10_000_000))
    events[-1]["args"]["dtype"] = "BFloat16"
    assert set(gains(run_of(tmp_path, events, ddp=DDP))) == {"hidden", "bucket", "half", "quarter", "powersgd"}


def test_what_is_no_exchange_of_gradients_can_only_be_hidden(tmp_path: Path) -> None:
    events = step()
    for rank in range(2):
        events.append(traces.collective(5_010 * US + rank, 4 * MS, 1_000, "all_gather", ranks=(0, 1)))
    assert set(gains(run_of(tmp_path, events, fsdp=True))) == {"hidden"}


def accumulating(folder: Path, between: int, *, traced: int = 5) -> Path:
    """Record two ranks whose optimizer steps after every fourth batch: 4 ms of exchange then, `between` ns else."""
    batch = 10 * MS
    ranks: list[Any] = []
    for rank in range(2):
        events: list[Any] = []
        for n in range(20, 20 + traced):
            at, last = (n - 20) * batch, n % 4 == 3
            exchanged = 4 * MS if last else between
            events += [traces.step(n, at, batch), *traces.launched("gemm", at, at + 10 * US, 1 * MS, 2 * n)]
            call = traces.call("cudaLaunchKernel", at + 20 * US, 5 * US, 2 * n + 1, tid=traces.AUTOGRAD)
            events += [call, traces.kernel("gemm_backward", at + 1_010 * US, 4 * MS, 2 * n + 1)]
            events += [traces.collective(at + 5_010 * US, exchanged, exchanged // 1_000)] if exchanged else []
        steps = [
            runs.light(n, batch, optimizer_steps=int(n % 4 == 3), profiled=int(20 <= n < 20 + traced))
            for n in range(60)
        ]
        facts = {"device": {"type": "cuda"}, "host": "node-1", "models": [{"parameters": 1, "ddp": DDP}]}
        ranks.append((traces.trace(*events, rank=rank), steps, facts))
    return runs.recorded(folder / "run", *ranks)


def test_exchanges_before_the_optimizer_steps_are_needed_once(tmp_path: Path) -> None:
    run = runs.measured(accumulating(tmp_path, 4 * MS), exchange_plans, overlap)
    plans = run.frame(exchange_plans).set_index("key")
    # Of four exchanges of 4 ms three are made for nothing.
    assert plans["gain_ns"]["once"] == pytest.approx(3 * MS)
    assert "once for 4 batches" in plans["why"]["once"]
    assert not {"half", "quarter"} & set(plans.index)


@pytest.mark.parametrize(("between", "traced"), [(0, 5), (100 * US, 5), (4 * MS, 3)])
def test_what_little_is_exchanged_between_is_no_gradient(tmp_path: Path, between: int, traced: int) -> None:
    # Nothing, a metric; or no batch was traced after which the optimizer steps.
    run = runs.measured(accumulating(tmp_path, between, traced=traced), exchange_plans, overlap)
    assert "once" not in set(run.frame(exchange_plans)["key"])


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


def in_both_passes(
    folder: Path, gpu: bool, *, name: str = "all_reduce", back: str = "", gradients: int = 0, **model: Any
) -> Path:
    """Record two ranks that exchange 1 ms in the forward and in the backward pass, and gradients for so long."""
    facts: dict[str, Any] = {"host": "node-1", "models": [{"parameters": 1, **model}]}
    facts |= {"device": {"type": "cuda"}} if gpu else {**runs.CPU, "backend": "gloo"}
    made: list[Any] = []
    for rank in range(2):
        forward = traces.annotation("dlprof::forward", 0, 3 * MS)
        events: list[Any] = [traces.step(0, 0, 20 * MS), forward, traces.annotation("dlprof::backward", 3 * MS, 6 * MS)]
        for n, at in enumerate((1 * MS, 5 * MS, 8 * MS)):
            dur, elements = (MS, 5_000) if n < 2 else (gradients, 5_000_000)
            if gpu and dur:
                # The host is far ahead: the forward pass is launched while nothing has run.
                events.append(traces.call("cudaLaunchKernel", at, 5 * US, 10 + n, tid=traces.MAIN if n < 1 else 4100))
                events.append(traces.collective(at + 5 * MS, dur, elements, name.replace("_", ""), correlation=10 + n))
            elif dur:
                events.append(traces.annotation(f"gloo:{back or name if n else name}", at, dur))
        events += [traces.kernel("gemm", 0, 5 * MS)] if gpu else [traces.op("aten::mm", 2 * MS, 2 * MS)]
        where: dict[str, Any] = {} if gpu else {"device": "", "backend": "gloo"}
        made.append((traces.trace(*events, rank=rank, **where), [], facts))
    return runs.recorded(folder / "run", *made)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", ["all_reduce", "all_to_all"])
def test_what_the_forward_pass_exchanges_is_no_gradient(tmp_path: Path, name: str, gpu: bool) -> None:
    run = runs.measured(in_both_passes(tmp_path, gpu, name=name), exchange_plans)
    assert run.frame(activations) == name
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
