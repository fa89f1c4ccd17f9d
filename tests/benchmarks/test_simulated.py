"""The runner on simulated jobs: its rows tell what was said and what is true, and its table counts what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.simulated import main, of_fault, of_fixed, of_healthy
from benchmarks.simulated_table import ANY, NOTABLE, Case, First, each, failures, table
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from simulator import folder, healthy
from simulator.faults import FAULTS

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


def test_each_recording_tells_its_truth_and_what_is_said_first() -> None:
    said = replace(
        WELL, event_ns=1_300, line="train.py:8", first=First("host_bound", 77 * MS, ("train.py:11", "model.py:3"))
    )
    *_, one, other = each([said, HARMLESS, SOUND]).splitlines()
    assert one == (
        "| no_workers | 0 | 1.3 | 100.00 → 70.00 | 30% | train.py:8 | `input_wait` | 1.03 | host_bound"
        " | train.py:11, model.py:3 | 77.00 | 1.10 |"
    )
    assert "| `input_wait` | clear | nothing | – | 101.00 | 1.01 |" in other


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


def test_small_findings_of_healthy_jobs_are_no_failures() -> None:
    assert failures(replace(SOUND, found=(("host_bound", 0.04),))) == []


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


def test_a_planted_fault_is_recorded_diagnosed_and_compared() -> None:
    case = of_fault("no_workers", 0, None)
    assert case.error == ""
    assert case.fixed_ns < 0.95 * case.true_ns
    assert case.reported_ns == pytest.approx(case.true_ns, rel=0.1)
    assert case.state in ("found", "clear", "not_measured")
    assert len(case.true_computation) == len(case.reported_computation) == 1
    assert any("true rank 0" in line for line in case.why)


@pytest.mark.long
# `python -m benchmarks.simulated --healthy 1000` asks a thousand: three of them take 10 s.
@settings(max_examples=3, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
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


def test_of_a_planted_fault_the_line_is_known_and_of_a_report_what_it_names_first() -> None:
    case = of_fault("no_workers", 0, None)
    assert case.line.startswith("train.py:")
    assert case.first is not None
    assert case.first.rule == case.found[0][0]
    assert case.first.lines[0] == case.line
    assert 500 <= case.event_ns <= 2_500


def test_of_a_fixed_job_the_rule_of_the_fault_finds_nothing() -> None:
    fault = next(f for f in FAULTS if f.name == "laps")
    case = of_fixed(fault.name, 3, None)
    assert (case.name, case.rule, case.harmless) == ("laps (fixed)", "host_sync", True)
    assert case.true_ns == case.fixed_ns == pytest.approx(of_fault(fault.name, 3, None).fixed_ns)
    assert failures(case) == []


def test_a_healthy_job_is_diagnosed() -> None:
    case = of_healthy(1, None)
    assert case.error == ""
    assert case.rule == ""
    assert case.true_ns == case.fixed_ns


def test_it_leaves_its_table_where_the_page_of_the_reports_leads_to(tmp_path: Path) -> None:
    assert main(["--only", "no_workers", "--seeds", "1", "--out", str(tmp_path)]) == 0
    assert "Found in 1 of 1 recordings" in (tmp_path / "simulated.md").read_text()
    (row,) = json.loads((tmp_path / "simulated.json").read_text())
    assert (row["name"], row["state"]) == ("no_workers", "found")
    assert "why" not in row
    assert "(simulated.md)" in (tmp_path / "README.md").read_text()
