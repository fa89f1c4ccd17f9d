"""What a report names is tried, with its prediction; the rest is left out with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlprof.errors import DlprofError
from dlprof.result import Change, Forecast, Outcome, Proposal, Result, RunInfo, Setting, Window, change
from dlprof.trial.planning import Candidate, Plan, plan


def outcome(*changes: Change, name: str = "input_wait", **more: Any) -> Outcome:
    return Outcome(name, "found", "Waits", saving_ns=20e6, share=0.2, speedup=1.25, changes=changes, **more)


def planned(
    *outcomes: Outcome, facts: dict[str, Any] | None = None, changes: tuple[Proposal, ...] = (), **options: Any
) -> Plan:
    result = Result(run=RunInfo("run"), window=Window(100, "steps", 100e6), outcomes=outcomes, changes=changes)
    return plan(result, facts or {}, **{"obvious": False, "allow_numerics": False} | options)


WORKERS = change("`num_workers=4`", num_workers=(0, 4), persistent_workers=(False, True))


TRAINED = change("`num_workers=4`", training=True, num_workers=(0, 4))
PREFETCH = change("`prefetch_factor=4`", prefetch_factor=(2, 4))
FUSED = change("fused", fused=(None, True))
TRAIN_OTHERWISE = (outcome(TRAINED, training=True), outcome(change("a cure"), TRAINED))
FORECASTS = (Forecast("num_workers", "4", 50e6), Forecast("num_workers", "2", 80e6))
BOTH: dict[str, Any] = {"loader.num_workers": 4, "loader.persistent_workers": True}
SAVING = ("input_wait",)


@pytest.mark.parametrize(
    ("outcomes", "options", "candidates"),
    [
        ([outcome(WORKERS)], {}, [Candidate(BOTH, SAVING, 1.25, "step", False)]),
        # Only the first change has the finding's saving, a bound is none, and a forecast counts before it.
        (
            *([outcome(WORKERS, PREFETCH)], {}),
            [Candidate(BOTH, SAVING, 1.25), Candidate({"loader.prefetch_factor": 4}, SAVING)],
        ),
        ([outcome(WORKERS, at_most=True)], {}, [Candidate(BOTH, SAVING)]),
        *(
            ([outcome(WORKERS, name=one.findings[0], scope=scope, at_most=True)], {}, [one])
            for scope, one in (
                ("run", Candidate(BOTH, ("slow_start",), of="start")),
                ("job", Candidate(BOTH, ("worker_restart",), of="loop")),
            )
        ),
        ([outcome(WORKERS, forecasts=FORECASTS)], {}, [Candidate(BOTH, SAVING, 2.0)]),
        # What the user names has no prediction.
        (
            *([outcome(WORKERS, forecasts=FORECASTS)], {"asked": ("loader.num_workers=2",)}),
            [Candidate(BOTH, SAVING, 2.0), Candidate({"loader.num_workers": 2})],
        ),
        # What changes the training is tried only where the user names it.
        *(([found], {}, []) for found in TRAIN_OTHERWISE),
        *(([found], {"allow_numerics": True}, []) for found in TRAIN_OTHERWISE),
        *(
            ([found], {"asked": ("loader.num_workers=4",)}, [Candidate({"loader.num_workers": 4})])
            for found in TRAIN_OTHERWISE
        ),
        (
            *([outcome(FUSED), outcome(FUSED, name="unfused_optimizer")], {}),
            [Candidate({"optimizer.fused": True}, ("input_wait", "unfused_optimizer"), 1.25)],
        ),
        (
            *([outcome(change("x", persistent_workers=(False, True)), scope="job")], {}),
            [Candidate({"loader.persistent_workers": True}, SAVING, 1.25, "loop")],
        ),
        # By their names outside.
        *(
            ([outcome(change("x", **sets))], {}, [Candidate(settings, SAVING, 1.25)])
            for sets, settings in (
                ({"OMP_NUM_THREADS": (4, 1)}, {"env.OMP_NUM_THREADS": "1"}),
                ({"bucket_cap_mb": (None, 50.0)}, {"ddp.bucket_cap_mb": 50.0}),
                ({"find_unused_parameters": (True, False)}, {"ddp.find_unused_parameters": False}),
                ({"non_blocking": (None, True), "NCCL_DEBUG": (None, "INFO")}, {"copy.non_blocking": True}),
            )
        ),
    ],
)
def test_what_is_tried(outcomes: list[Outcome], options: dict[str, Any], candidates: list[Candidate]) -> None:
    assert list(planned(*outcomes, **options).candidates) == candidates


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
    (left,) = refused.left_out
    assert (refused.candidates, left.settings, left.verdict) == ((), overrides, "not_tried")
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
    # With the forecast that a rule made, whether or not it found anything.
    clear = Outcome("input_wait", "clear", "Waits", forecasts=(Forecast("num_workers", "2", 80e6),))
    known = planned(clear, facts=FACTS, obvious=True).candidates
    assert {c.settings.get("loader.num_workers"): c.predicted for c in known}[2] == 1.25
    restarts = FACTS | {"loaders": [{"role": "train", "num_workers": 2, "persistent_workers": False}]}
    assert {"loader.persistent_workers": True} in [c.settings for c in planned(facts=restarts, obvious=True).candidates]


RESHARD = change("`reshard_after_forward=False`", reshard_after_forward=(True, False))
EDIT = {"fsdp.reshard_after_forward": False}


def proposed(change: Change, **more: Any) -> Proposal:
    return Proposal(change, ("input_wait",), "step", 100e6, 80e6, 1.25, **more)


def test_what_no_setting_makes_is_tried_by_an_edit_where_there_is_one() -> None:
    made = planned(outcome(RESHARD), editable=lambda settings: settings == EDIT)
    assert [c.settings for c in made.candidates] == [EDIT]
    assert made.by_hand is None
    code = Change("leave it out", (Setting("train.py:5", to="collected_by_hand"),))
    made = planned(outcome(code), editable=lambda settings: settings == {"code.train.py:5": "collected_by_hand"})
    assert [(c.settings, c.numerics) for c in made.candidates] == [({"code.train.py:5": "collected_by_hand"}, False)]
    left = planned(outcome(RESHARD), changes=(proposed(RESHARD), proposed(WORKERS)))
    assert (left.candidates, left.by_hand) == ((), RESHARD)
    assert "no edit does it" in left.skipped[0]


def test_what_may_gain_most_is_tried_first() -> None:
    code = Change("leave it out", (Setting("train.py:5", to="collected_by_hand"),))
    bounded = replace(outcome(code, name="gc_pauses"), speedup=1.6, at_most=True)
    made = planned(outcome(WORKERS), bounded, editable=lambda settings: "code.train.py:5" in settings)
    assert [(c.findings, c.predicted) for c in made.candidates] == [(("gc_pauses",), None), (("input_wait",), 1.25)]


def test_what_gains_too_little_is_tried_on_request_alone() -> None:
    small = Outcome(
        "gc_pauses", "found", "t", saving_ns=1e6, share=0.01, speedup=1.01, changes=(change("x", freeze=(None, True)),)
    )
    risk = outcome(PREFETCH, name="memory_headroom", scope="risk")
    found = planned(outcome(WORKERS), small, risk)
    assert [c.settings for c in found.candidates] == [BOTH]
    assert [a.findings for a in found.left_out] == [("gc_pauses",), ("memory_headroom",)]
    assert all("--obvious" in a.why for a in found.left_out)
    assert {"gc.freeze": True} in [c.settings for c in planned(small, obvious=True).candidates]
    # What the user names is tried, and stands in no other list.
    named = planned(small, asked=("gc.freeze=True",))
    assert ([c.settings for c in named.candidates], named.left_out) == ([{"gc.freeze": True}], ())


def test_only_the_changes_of_some_numbers_are_tried() -> None:
    changes = (proposed(WORKERS), proposed(TRAINED, at_most=True), proposed(Change("sleep less")))
    found = planned(outcome(PREFETCH), changes=changes, numbers=(2, 1))
    assert found.candidates == (Candidate(BOTH, SAVING, 1.25), Candidate({"loader.num_workers": 4}, SAVING, None))
    for number, why in ((3, "sleep less"), (4, "proposes 3 changes"), (0, "proposes 3")):
        with pytest.raises(DlprofError, match=why):
            planned(changes=changes, numbers=(number,))


def test_only_what_is_asked_for_is_tried() -> None:
    asked = ("loader.num_workers=3",)
    assert len(planned(outcome(PREFETCH), asked=asked).candidates) == 2
    found = planned(outcome(PREFETCH), asked=asked, only=True)
    assert (found.candidates, found.left_out, found.by_hand) == ((Candidate({"loader.num_workers": 3}),), (), None)


@pytest.mark.parametrize(("cores", "tried"), [(8, [(4, 2.0)]), (2, [(2, 1.25)]), (1, [])])
def test_workers_of_which_a_finding_is_not_sure_are_tried_as_far_as_there_are_cores(
    cores: int, tried: list[tuple[int, float]]
) -> None:
    unsure = outcome(Change("whether more workers help is not known"), forecasts=FORECASTS)
    found = planned(unsure, facts={"cpu": {"affinity": cores}}).candidates
    assert [(c.settings["loader.num_workers"], c.predicted) for c in found] == tried
