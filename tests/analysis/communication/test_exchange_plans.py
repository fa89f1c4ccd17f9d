"""Plans of exchanging differently: exact on made steps, and without a figure where the run does not show one."""

from pathlib import Path

import pytest

from dlprof.analysis.communication.exchange_plans import exchange_plans, fitted
from dlprof.analysis.communication.overlap import exposed_transfer, overlap
from dlprof.analysis.communication.rules import exposed_communication
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.exchanges import DDP, US, accumulating, gains, gpu_step, planned, small_buckets
from tests.fixtures.runs import MS


def sizes(*, small: int, large: int) -> list[tuple[int, int, int]]:
    """Return three small and three large all-reduces after backward pass: 100 µs to start, 1 µs for 10,000 bytes."""
    found, at = [], 5_010 * US
    for elements in (small, large) * 3:
        dur = 100 * US + elements * 4 // 10
        found.append((at, dur, elements))
        at += dur
    return found


def test_two_classes_of_size_tell_starting_from_moving(tmp_path: Path) -> None:
    run = planned(tmp_path, gpu_step(*sizes(small=25_000, large=2_500_000)), ddp=DDP)
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


def test_small_buckets_that_mostly_start_become_few(tmp_path: Path) -> None:
    plans = planned(tmp_path, small_buckets(), ddp=DDP).frame(exchange_plans).set_index("key")
    plan = plans.loc["bucket"]
    assert plans["bucket_cap_mb"].dropna().to_dict() == {"bucket": 1.0}
    # Forty exchanges of 2.02 MB take 4.202 ms: 1.277 ms more than 39/40 of 3 ms. Two take 0.402 ms, half of it open.
    assert plan["change"] == "`bucket_cap_mb=1` (is 1)"
    assert plan["gain_ns"] == pytest.approx(1.277 * MS - 0.201 * MS, rel=1e-3)


def test_exchanges_that_are_alike_do_not_tell_what_starting_takes(tmp_path: Path) -> None:
    run = planned(tmp_path, gpu_step(*sizes(small=25_000, large=25_000)), ddp=DDP)
    assert run.frame(fitted) is None
    plans = run.frame(exchange_plans).set_index("key")
    assert plans["gain_ns"][["bucket", "bytes", "powersgd"]].isna().all()
    assert "alike" in plans["why"]["bucket"]
    assert plans["gain_ns"]["half"] == pytest.approx(run.frame(exposed_transfer)[0] / 2)


def test_large_exchanges_take_half_as_long_for_half_the_bytes(tmp_path: Path) -> None:
    run = planned(tmp_path, gpu_step((5_010 * US, 4 * MS, 10_000_000)), ddp=DDP)
    assert gains(run)["bytes"] == pytest.approx(2 * MS)


def test_sixteen_bits_are_not_offered_to_who_has_them(tmp_path: Path) -> None:
    events = gpu_step((5_010 * US, 4 * MS, 10_000_000))
    events[-1]["args"]["dtype"] = "BFloat16"
    assert set(gains(planned(tmp_path, events, ddp=DDP))) == {"hidden", "bucket", "half", "quarter", "powersgd"}


def test_what_is_no_exchange_of_gradients_can_only_be_hidden(tmp_path: Path) -> None:
    events = gpu_step()
    for rank in range(2):
        events.append(traces.collective(5_010 * US + rank, 4 * MS, 1_000, "all_gather", ranks=(0, 1)))
    assert set(gains(planned(tmp_path, events, fsdp=True))) == {"hidden"}


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


@pytest.mark.parametrize("now", [0.01, 1.0])
def test_the_rule_names_the_buckets_of_the_best_plan_unless_they_are_there(tmp_path: Path, now: float) -> None:
    planned(tmp_path, small_buckets(100), ddp=DDP | {"bucket_cap_mb": now})
    found = ask(exposed_communication.RULE, tmp_path / "run")
    named = [s for c in found.changes for s in c.settings if s.name == "bucket_cap_mb"]
    plans = gains(planned(tmp_path / "again", small_buckets(100), ddp=DDP))
    assert max(plans, key=lambda key: plans[key]) == "bucket"
    assert plans["bucket"] == pytest.approx(found.saving_ns)
    if now == 1.0:
        assert (found.forecasts, named[0].to) == ((), 25.0)
    else:
        assert (named, [f.value for f in found.forecasts]) == ([Setting("bucket_cap_mb", now, 1.0)], ["1.0"])
