"""The sentences of a report: its headline, and its warnings."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlprof.analysis.estimate import change
from dlprof.plain import NBSP
from dlprof.report import html, verdict
from dlprof.result import Forecast, ForeignLoad, HostLimited, HostPart, MemoryPeak, Result, RunInfo
from dlprof.result.figures import Profile
from tests.fixtures import results
from tests.fixtures.results import MS


def test_headline_is_the_verdict_of_the_largest_finding_and_its_gain() -> None:
    diagnosis, gain, _ = verdict.headline(results.ddp())
    assert diagnosis == "31 % of each step waits for data on rank 1."
    assert "1.44" in gain


def test_headline_of_a_healthy_run_says_what_fills_the_step_and_what_was_not_checked() -> None:
    diagnosis, gain, _ = verdict.headline(results.healthy())
    assert diagnosis.startswith("Computation takes 89")
    assert "5" in gain
    assert "2 could not be measured" in gain


def test_a_change_of_the_training_is_never_in_the_headline() -> None:
    assert verdict.headline(results.training()) == verdict.headline(results.ddp())
    healthy = results.healthy()
    apart = replace(healthy, outcomes=(results.LARGER, *healthy.outcomes))
    assert verdict.headline(apart) == verdict.headline(healthy)


@pytest.mark.parametrize(
    ("whole", "parts", "told"),
    [
        (10, [("loop", 4), ("loop", 2), ("launches", 3), ("waits", 0.1)], True),
        (10, [("loop", 9), ("launches", 0.1)], False),
        (1, [("loop", 0.9), ("launches", 0.9)], False),
    ],
    ids=["divided", "one part", "little"],
)
def test_what_a_device_waits_for_its_host_for_is_said_once_and_divided(
    whole: float, parts: list[tuple[str, float]], told: bool
) -> None:
    """Of a step of 42 ms; two loops are one part, and what is below 2 % of the step is left out."""
    limited = HostLimited(0, whole * MS, tuple(HostPart(part, "", 0.0, ns * MS) for part, ns in parts))
    result = results.ddp()
    assert result.window is not None
    result = replace(result, host_limited=limited, window=replace(result.window, step_ns=42.0 * MS))
    text = verdict.host_limited(result).replace(NBSP, " ")
    assert bool(text) == told
    if told:
        assert "would take 32.0 ms instead of 42.0 ms" in text
        assert "6.00 ms, launches of the forward and backward pass 3.00 ms." in text
        assert text in html.render(result).replace(NBSP, " ")


def test_a_larger_part_that_no_rule_could_judge_comes_before_the_findings() -> None:
    result = results.ddp()
    found = result.found[0]
    parts = {"computation": 0.05, "queued_wait": found.share + 0.2}
    parts["input_wait"] = 1 - sum(parts.values())
    mute = results.outcome("queued_wait", "not_measured", "Queued work that waits", why="it is a graph")
    result = replace(result, time=results.time_of(0, 42.0, **parts), outcomes=(*result.outcomes, mute))
    first, second, _ = (text.replace(NBSP, " ") for text in verdict.headline(result))
    assert first.endswith(": it is a graph.")
    assert "31 % of each step waits for data on rank 1." in second
    # A smaller one does not come first.
    parts |= {"queued_wait": found.share - 0.1}
    parts["input_wait"] = 1 - parts["computation"] - parts["queued_wait"]
    result = replace(result, time=results.time_of(0, 42.0, **parts))
    assert verdict.headline(result)[0].startswith("31")


def test_a_step_that_computes_nearly_all_of_the_time_says_so_before_a_finding() -> None:
    result = results.ddp()
    small = replace(result.found[0], share=0.04)
    others = tuple(o for o in result.outcomes if o.state != "found")
    time = results.time_of(0, 42.0, computation=0.95, input_wait=0.05)
    said = verdict.headline(replace(result, time=time, outcomes=(small, *others)))[0].replace(NBSP, " ")
    assert said.startswith("Computation takes 95 % of each step. 31 % of each step waits")


def test_headline_of_a_run_without_steps_claims_nothing() -> None:
    diagnosis, gain, _ = verdict.headline(results.empty())
    assert diagnosis == "No steady step was recorded."
    assert gain.startswith("No rule could be checked")


def test_the_headline_says_why_the_largest_part_could_not_be_judged() -> None:
    result = results.healthy()
    parts = {"host": 0.9, "computation": 0.1}
    late = replace(result, time=results.time_of(0, 42.0, **parts))
    mute = results.outcome("host_bound", "not_measured", "Waiting for the host", why="1 kernel a step")
    said = verdict.headline(replace(late, outcomes=(*result.outcomes, mute)))
    assert said[0].replace(NBSP, " ") == "90 % of each step waits for the host: 1 kernel a step."
    assert said[1] == verdict.headline(replace(result, outcomes=(*result.outcomes, mute)))[1]
    fine = verdict.headline(replace(result, outcomes=(*result.outcomes, mute)))
    assert "1 kernel a step" not in " ".join(fine)


def test_unattributed_time_is_not_named_as_a_category() -> None:
    time = results.time_of(0, 42.0, other=0.7, copy=0.2, host=0.1)
    said = verdict.headline(replace(results.healthy(), time=time))[0].replace(NBSP, " ")
    assert said == "70 % of each step is not attributed to any category."
    alone = replace(results.healthy(), time=results.time_of(0, 42.0, other=1.0))
    assert verdict.headline(alone)[0].startswith("100")


def test_notices_say_how_the_run_ended_and_what_it_warned_of() -> None:
    killed, missing = verdict.notices(results.empty())
    assert "signal 9" in killed
    assert missing == "3 of 4 ranks are not here: 1, 2, 3"
    assert verdict.notices(results.healthy()) == []


def test_the_setting_that_a_saving_was_predicted_for_is_its_remedy() -> None:
    result = results.ddp()
    first = result.found[0]
    step = 214.6 * MS

    def gain(*forecasts: Forecast, workers: int = 6) -> str:
        told = replace(first, forecasts=forecasts, changes=(change("more workers", num_workers=(2, workers)),))
        return verdict.headline(replace(result, outcomes=(told, *result.outcomes[1:])))[1].replace(NBSP, " ")

    near = Forecast("num_workers", "6", step - 1.05 * first.saving_ns)
    assert gain(near) == "num_workers=6 at train.py:61 would make this job 1.44 × faster."
    assert (
        gain(Forecast("num_workers", "6", step - 0.5 * first.saving_ns))
        == "Fixing it at train.py:61 would make this job 1.44 × faster."
    )
    assert gain(near, workers=60) == "Fixing it at train.py:61 would make this job 1.44 × faster."
    assert gain() == "Fixing it at train.py:61 would make this job 1.44 × faster."
    first = replace(first, at_most=True)
    assert gain() == "Fixing it at train.py:61 would make this job at most 1.44 × faster."
    first = replace(first, where=())  # no line of the script is known
    assert gain() == "Fixing it would make this job at most 1.44 × faster."


def test_a_run_beside_other_programs_clears_the_job_of_nothing() -> None:
    load = ForeignLoad("node-1", cores=8.0, used=8.0, foreign=2.5, waited=0.3, disturbs=True)
    quiet = verdict.headline(replace(results.healthy(), foreign_load=replace(load, disturbs=False)))
    assert quiet == verdict.headline(results.healthy())
    diagnosis, gain, _ = verdict.headline(replace(results.healthy(), foreign_load=load))
    assert diagnosis == quiet.diagnosis
    assert gain.startswith("Programs outside the job used 2.50 of 8 cores")
    assert "nothing" not in gain
    # A finding stays the first thing that is said; the warning is beside it.
    found = replace(results.ddp(), foreign_load=load)
    assert verdict.headline(found) == verdict.headline(results.ddp())


def test_a_snapshot_beside_stacks_is_told_as_well() -> None:
    profile = Profile("p.json", "py-spy", "samples", 400.0, "decode", "/me/data.py", 41, 0.5, own=True)
    both = Result(
        RunInfo("run"), None, memory=(MemoryPeak(0, 0, 5e8, 6e8, "forward (a.py:1)", 1e8),), profiles=(profile,)
    )
    diagnosis, gain, _ = verdict.headline(both)
    assert "decode (data.py:41)" in diagnosis
    assert f"500{NBSP}MB" in gain
    assert "forward (a.py:1)" in gain


def test_where_nothing_is_found_the_rule_of_the_largest_part_says_why() -> None:
    healthy = results.healthy()
    why = "pinning them would not help"
    copies = replace(results.outcome("pageable_copy", "clear", "Copies", summary=why), lost_share=0.5)
    parts = results.time_of(0, 42.0, copy=0.6, computation=0.4)
    told = replace(healthy, time=parts, outcomes=(copies,))
    assert verdict.headline(told).diagnosis.endswith(f" of each step. P{why[1:]}.")
    # Not where that costs little, nor where another part is the largest.
    little = replace(told, outcomes=(replace(copies, lost_share=0.01),))
    other = replace(told, time=results.time_of(0, 42.0, computation=0.6, copy=0.4))
    assert not any("inning" in verdict.headline(one).diagnosis for one in (little, other))
