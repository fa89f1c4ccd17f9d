"""What a report names is tried, with its prediction; the rest is left out with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.result import Change, Forecast, Outcome, Result, RunInfo, Window, change
from dlprof.trial.planning import Candidate, Plan, plan


def outcome(*changes: Change, name: str = "input_wait", **more: Any) -> Outcome:
    return Outcome(name, "found", "Waits", saving_ns=20e6, share=0.2, speedup=1.25, changes=changes, **more)


def planned(*outcomes: Outcome, facts: dict[str, Any] | None = None, **options: Any) -> Plan:
    result = Result(run=RunInfo("run"), window=Window(100, "steps", 100e6), outcomes=outcomes)
    return plan(result, facts or {}, **{"obvious": False, "allow_numerics": False} | options)


WORKERS = change("`num_workers=4`", num_workers=(0, 4), persistent_workers=(False, True))


def test_a_change_is_tried_whole_with_what_its_finding_predicts() -> None:
    (one,) = planned(outcome(WORKERS)).candidates
    assert one == Candidate(
        {"loader.num_workers": 4, "loader.persistent_workers": True}, ("input_wait",), 1.25, "step", False
    )


def test_only_the_first_change_has_the_findings_saving() -> None:
    found = planned(outcome(WORKERS, change("`prefetch_factor=4`", prefetch_factor=(2, 4)))).candidates
    assert [c.predicted for c in found] == [1.25, None]


def test_what_changes_the_training_is_tried_only_where_the_user_names_it() -> None:
    trained = change("`num_workers=4`", training=True, num_workers=(0, 4))
    for found in (outcome(trained, training=True), outcome(change("a cure"), trained)):
        assert planned(found) == Plan(())
        assert planned(found, allow_numerics=True) == Plan(())
        (one,) = planned(found, asked=("loader.num_workers=4",)).candidates
        assert one == Candidate({"loader.num_workers": 4})


def test_a_saving_that_is_a_bound_predicts_no_change() -> None:
    (one,) = planned(outcome(WORKERS, at_most=True)).candidates
    assert one.predicted is None


def test_a_forecast_counts_before_the_saving() -> None:
    forecasts = (Forecast("num_workers", "4", 50e6), Forecast("num_workers", "2", 80e6))
    (one,) = planned(outcome(WORKERS, forecasts=forecasts)).candidates
    assert one.predicted == 2.0
    found = planned(outcome(WORKERS, forecasts=forecasts), asked=("loader.num_workers=2",), obvious=False).candidates
    assert [c.predicted for c in found] == [2.0, None]  # the user's own words have no prediction


def test_what_several_findings_name_is_tried_once() -> None:
    fused = change("fused", fused=(None, True))
    (one,) = planned(outcome(fused), outcome(fused, name="unfused_optimizer")).candidates
    assert one.findings == ("input_wait", "unfused_optimizer")


@pytest.mark.parametrize(
    ("sets", "overrides"),
    [
        ({"OMP_NUM_THREADS": (4, 1)}, {"env.OMP_NUM_THREADS": "1"}),
        ({"bucket_cap_mb": (None, 50.0)}, {"ddp.bucket_cap_mb": 50.0}),
        ({"find_unused_parameters": (True, False)}, {"ddp.find_unused_parameters": False}),
        ({"non_blocking": (None, True), "NCCL_DEBUG": (None, "INFO")}, {"copy.non_blocking": True}),
    ],
)
def test_settings_by_their_names_outside(sets: dict[str, Any], overrides: dict[str, Any]) -> None:
    (one,) = planned(outcome(change("x", **sets))).candidates
    assert one.settings == overrides


@pytest.mark.parametrize(
    ("sets", "overrides"),
    [
        ({"autocast_enabled": (False, True), "autocast_dtype": (None, "bfloat16")}, {"torch.autocast": "bf16"}),
        ({"float32_precision": ("highest", "high")}, {"torch.float32_matmul_precision": "high"}),
        ({"fp32_precision": (None, "tf32")}, {"torch.float32_matmul_precision": "high"}),
        ({"mode": (None, "reduce-overhead")}, {"torch.compile": "reduce-overhead"}),
    ],
)
def test_what_changes_numbers_is_tried_only_if_allowed(sets: dict[str, Any], overrides: dict[str, Any]) -> None:
    refused = planned(outcome(change("x", numerics=True, **sets)))
    assert refused.candidates == ()
    (left,) = refused.left_out
    assert (left.settings, left.verdict) == (overrides, "not_tried")
    assert "--allow-numerics" in left.why
    (one,) = planned(outcome(change("x", **sets)), allow_numerics=True).candidates
    assert (one.settings, one.numerics) == (overrides, True)


def test_what_has_no_name_or_value_outside_is_left_out_with_the_reason() -> None:
    found = planned(
        outcome(
            change("`in_order=False`", in_order=(True, False)),
            change("a schedule", num_workers=(0, None)),
            change("half of it", num_workers=(0, 2), in_order=(True, False)),
            change("`TORCH_LOGS=recompiles`", TORCH_LOGS=(None, "recompiles")),
            Change("make a sample cheaper"),
        )
    )
    assert found.candidates == ()
    assert len(found.skipped) == 3
    assert all(s.startswith("input_wait: ") for s in found.skipped)


def test_time_outside_the_steps_is_measured_by_the_loop() -> None:
    (one,) = planned(outcome(change("x", persistent_workers=(False, True)), scope="job")).candidates
    assert one.of == "loop"


def test_the_users_own_are_tried_and_checked() -> None:
    found = planned(asked=("loader.num_workers=2 loader.prefetch_factor=4", "env.OMP_NUM_THREADS=1"))
    assert [dict(c.settings) for c in found.candidates] == [
        {"loader.num_workers": 2, "loader.prefetch_factor": 4},
        {"env.OMP_NUM_THREADS": "1"},
    ]
    with pytest.raises(DlprofError, match="odd"):
        planned(asked=("loader.odd=2",))


FACTS = {
    "world_size": 2,
    "cpu": {"affinity": 8, "torch_threads": 8, "quota": 6.0},
    "device": {"type": "cpu"},
    "loaders": [{"role": "train", "num_workers": 0, "persistent_workers": False, "pin_memory": False}],
    "optimizers": [{"class": "SGD", "fused": None}],
    "models": [{"class": "Net"}],
}


def test_what_anyone_would_try_is_what_is_not_so_already() -> None:
    found = planned(facts=FACTS, obvious=True)
    words = {f"{n}={v}" for c in found.candidates for n, v in c.settings.items()}
    assert {"loader.num_workers=1", "loader.num_workers=2", "loader.num_workers=3"} <= words
    assert {"env.OMP_NUM_THREADS=1", "env.OMP_NUM_THREADS=3", "optimizer.fused=True", "gc.freeze=True"} <= words
    assert "loader.num_workers=0" not in words
    assert not any(w.startswith(("loader.pin_memory", "torch.cudnn")) for w in words)
    assert {n for a in found.left_out for n in a.settings} == {"torch.autocast", "torch.compile"}
    on_gpu = planned(facts=FACTS | {"device": {"type": "cuda"}}, obvious=True)
    assert {"loader.pin_memory", "torch.cudnn_benchmark"} <= {n for c in on_gpu.candidates for n in c.settings}


def test_which_exclude_each_other() -> None:
    threads = Candidate({"env.OMP_NUM_THREADS": "1"})
    assert threads.excludes(["torch.num_threads"])
    assert threads.excludes(["env.OMP_NUM_THREADS"])
    assert not threads.excludes(["loader.num_workers", "gc.freeze"])
