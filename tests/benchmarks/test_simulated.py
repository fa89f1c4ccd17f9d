"""The benchmark on simulated jobs: its table, every fault found with what its fix gains, and modules by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlprof
from benchmarks.simulated import of_fault, of_fixed
from benchmarks.simulated_table import ANY, NOTABLE, Case, failures, false_of, table
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.result.figures import InModule
from simulator import folder, healthy
from simulator.faults import FAULTS
from simulator.job import Job, Recording

MS = 1e6

WELL = Case(
    "no_workers", "input_wait", 0, "torch-2.13", 1, 100 * MS, 70 * MS,
    reported_ns=101 * MS, predicted_ns=72 * MS, state="found",
    true_computation=(0.7,), reported_computation=(0.69,), found=(("input_wait", 0.3),),
)  # fmt: skip
HARMLESS = replace(WELL, name="kept_up", fixed_ns=100 * MS, predicted_ns=None, state="clear", found=(), harmless=True)
SOUND = replace(WELL, name="healthy", rule="", fixed_ns=100 * MS, predicted_ns=None, state="", found=())


def test_a_case_that_is_right_fails_nowhere() -> None:
    assert failures(WELL) == []
    assert failures(SOUND) == []
    assert failures(HARMLESS) == []


@pytest.mark.parametrize(
    ("found", "accepted", "wrong"),
    [
        ((("input_wait", 0.04),), (), 0),
        ((("input_wait", 0.06),), (), 1),
        ((("exposed_copy", 0.06),), (), 1),
        ((("exposed_copy", 0.06),), ("exposed_copy",), 0),
        ((("exposed_copy", 0.06), ("host_bound", 0.2)), ANY, 0),
        ((("input_wait", 0.06), ("host_bound", 0.2)), ANY, 1),
    ],
)
def test_a_fault_that_costs_nothing_is_not_to_be_found(
    found: tuple[tuple[str, float], ...], accepted: tuple[str, ...], wrong: int
) -> None:
    case = replace(HARMLESS, found=found, accepted=accepted)
    assert len(failures(case)) == wrong
    assert f"in {wrong} of 1 jobs whose fault costs nothing" in table([case], {}, [])
    assert "Found in" not in table([case], {}, [])


@pytest.mark.parametrize(
    "wrong",
    [
        replace(WELL, reported_ns=110 * MS),
        replace(WELL, reported_ns=None),
        replace(WELL, reported_computation=(0.5,)),
        replace(WELL, predicted_ns=90 * MS),
        replace(WELL, predicted_ns=None, state="clear", found=()),
        replace(WELL, error="host_bound: KeyError"),
        replace(SOUND, found=(("host_bound", 0.06),)),
    ],
)
def test_what_is_wrong_is_told(wrong: Case) -> None:
    assert len(failures(wrong)) == 1


def test_held_out_seeds_are_counted_apart() -> None:
    missed = replace(WELL, seed=1, predicted_ns=None, state="clear", found=(("host_bound", 0.2),))
    false = replace(SOUND, seed=5, found=(("straggler", 0.1),))
    text = table([WELL, missed, SOUND, false], {}, ["memory_growth"])
    assert "Found in 1 of 2 recordings of 1 faults; as the first in 1." in text
    assert "A finding of 5% or more in 1 of 2 random healthy jobs." in text
    tuned, _, rest = text.partition("## Held-out seeds")
    held, _, sound = rest.partition("## Healthy jobs")
    assert "| no_workers | `input_wait` | 1/1 | 1/1 | – |" in tuned
    assert "| no_workers | `input_wait` | 0/1 | 0/1 | host_bound 1 |" in held
    assert "1 of 2 without" in sound
    assert "| `straggler` | 1 | 5 |" in sound


@pytest.mark.long
def test_a_planted_fault_is_recorded_diagnosed_and_compared() -> None:
    case = of_fault("no_workers", 0, None)
    assert case.error == ""
    assert case.fixed_ns < 0.95 * case.true_ns
    assert case.reported_ns == pytest.approx(case.true_ns, rel=0.1)
    assert len(case.true_computation) == len(case.reported_computation) == 1
    # Of the fault the line is known, and of the report what it names first.
    assert case.line.startswith("train.py:")
    assert case.first is not None
    assert (case.first.rule, case.first.lines[0]) == (case.found[0][0], case.line)
    assert 500 <= case.event_ns <= 2_500


@pytest.mark.long
# `python -m benchmarks.simulated --healthy 1000` asks a thousand.
@settings(max_examples=1, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(10_000, 99_999))
def test_random_healthy_jobs_keep_what_always_holds(seed: int) -> None:
    job, how, true = healthy.healthy(seed)
    with TemporaryDirectory() as at:
        folder.write(Path(at) / "run", job, how)
        result = diagnose(open_run(Path(at) / "run"), RULES, jobs=1)
    assert [o.id for o in result.outcomes if o.state == "error"] == []
    assert [(o.id, o.share) for o in result.found if o.share >= NOTABLE] == []
    assert result.window is not None
    assert result.window.step_ns == pytest.approx(true.period_ns, rel=0.02)
    for rank in true.ranks:
        parts = [t for t in result.time if t.rank == rank.rank]
        assert sum(t.share for t in parts) == pytest.approx(1, abs=1e-6)
        computed = sum(t.share for t in parts if t.category == "computation")
        assert computed == pytest.approx(rank.parts["computation"] / rank.step_ns, abs=0.02)


@pytest.mark.long
def test_of_a_fixed_job_the_rule_of_the_fault_finds_nothing() -> None:
    fault = next(f for f in FAULTS if f.name == "item_every_step")
    case = of_fixed(fault.name, 3, None)
    assert (case.name, case.rule, case.harmless) == ("item_every_step (fixed)", fault.rule, True)
    assert case.true_ns == case.fixed_ns == pytest.approx(of_fault(fault.name, 3, None).fixed_ns)
    assert failures(case) == []


SEED = 1
NEAR = 0.15

# Their fix makes other work faster too, which is not promised: autocast halves what all operators move.
CAUTIOUS = ("float32",)


# One fault of each kind; all others, each of some seconds, run before a release.
ALWAYS = (
    "checkpoints", "float32", "garbage", "item_every_step", "no_workers", "recompiles", "tiny_kernels",
)  # fmt: skip


def marked(name: str) -> object:
    return name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow)


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


def test_every_fault_is_of_a_rule() -> None:
    assert {fault.rule for fault in FAULTS} <= {rule.id for rule in RULES}
    assert {*ALWAYS} <= {fault.name for fault in FAULTS}


def planted(name: str) -> Job:
    (fault,) = (f for f in FAULTS if f.name == name)
    return replace(fault.make(5), modules=True)


def found_in(tmp_path: Path, name: str, rule: str) -> tuple[InModule, ...]:
    """Return the modules that a rule's finding names in the job of a fault."""
    folder.write(tmp_path / "run", planted(name), Recording())
    (found,) = (o for o in dlprof.open(tmp_path / "run").result.found if o.id == rule)
    return found.modules


@pytest.mark.long
def test_products_in_float32_are_in_the_layers_that_multiply(tmp_path: Path) -> None:
    modules = found_in(tmp_path, "float32", "fp32_matmul")
    assert {one.path for one in modules} == {"block*.up", "block*.down", "block*.qkv", "head"}
    assert modules[0].kind == "Linear"
    assert sum(one.share for one in modules) == pytest.approx(0.93, abs=0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param("unfused_attention", "unfused_attention", marks=pytest.mark.slow),
        ("tiny_kernels", "host_bound"),
    ],
)
def test_what_the_blocks_do_is_in_them(tmp_path: Path, name: str, rule: str) -> None:
    first = found_in(tmp_path, name, rule)[0]
    assert first.path == "block*"
    assert first.share > 0.8


@pytest.mark.slow
def test_what_the_script_does_between_modules_is_in_none(tmp_path: Path) -> None:
    assert found_in(tmp_path, "slow_python", "step_python") == ()
    result = dlprof.open(tmp_path / "run").result
    assert [o.id for o in result.found if not o.training] == ["step_python"]
