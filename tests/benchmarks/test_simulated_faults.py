"""Every simulated fault of a GPU job is found, by its rule, with the step that the fixed job then takes.

`python -m benchmarks.simulated` measures the same over many seeds and prints how near it comes.
"""

from __future__ import annotations

import pytest

from benchmarks.simulated import of_fault
from benchmarks.simulated_table import false_of
from dlprof.analysis.rules import RULES
from simulator.faults import FAULTS

SEED = 1
NEAR = 0.15

# Their fix makes other work faster too, which is not promised: autocast halves what all operators move.
CAUTIOUS = ("float32",)


# Further faults of a rule that another one stands for: each takes some seconds, and 4 to 18 where it has several ranks.
FURTHER = (
    "after_backward", "bookkeeping", "boolean_mask", "cast_loss", "changing_experts", "few_workers", "gpipe",
    "graph_waits", "host_function", "loop_optimizer", "many_launches", "more_work", "one_hot_gpu", "rank_sleeps",
    "hidden_average_loop", "hidden_bookkeeping", "hidden_optimizer_loop", "hidden_pinning", "laps_of_a_full_device",
    "launches_left", "loops_optimizer", "loops_parameters", "norm_items", "optimizer_loop", "pinning_as_long",
    "pinning_limits", "prefetch_used_up", "slow_loader_one_rank", "small_batch_counted", "small_written_norms",
    "sync_every_batch", "synchronize_every_step", "tiny_buckets", "values_read", "wait_then_loader", "workers_keep_up",
)  # fmt: skip


def marked(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow) if name in FURTHER else name


@pytest.mark.long
@pytest.mark.parametrize("name", [marked(f.name) for f in FAULTS])
def test_a_planted_fault_is_found_with_what_its_fix_gains(name: str) -> None:
    case = of_fault(name, SEED, None)
    assert case.error == ""
    assert case.reported_ns == pytest.approx(case.true_ns, rel=0.05)  # a hundred steps, not all of them
    if case.harmless:
        assert false_of(case) == []
        return
    assert case.state == "found"
    assert case.predicted_ns is not None
    assert case.at_most or case.predicted_ns >= (1 - NEAR) * case.fixed_ns
    if name not in CAUTIOUS:
        assert case.predicted_ns <= (1 + NEAR) * case.fixed_ns


def test_every_fault_is_of_a_rule_and_one_of_each_rule_is_always_checked() -> None:
    rules = {fault.rule for fault in FAULTS}
    assert rules <= {rule.id for rule in RULES}
    always = {fault.rule for fault in FAULTS if fault.name not in FURTHER}
    assert always == {fault.rule for fault in FAULTS if not fault.harmless}
    assert {*FURTHER} <= {fault.name for fault in FAULTS}
