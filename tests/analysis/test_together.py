"""What all findings save together, against hand-made claims."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.read.run import Run, open_run
from dlprof.result import CATEGORIES
from tests.fixtures import runs
from tests.fixtures.asking import STEP_NS, finding, rule, two_ranks


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return two_ranks(tmp_path_factory.mktemp("job"))


def test_what_findings_claim_twice_is_saved_once(job: Run) -> None:
    def together(*rules: Rule) -> float:
        most = diagnose(job, rules, jobs=1).together
        assert most is not None
        assert most.saving_ns == pytest.approx(most.share * STEP_NS)
        assert most.speedup == pytest.approx(1 / (1 - most.share))
        return most.share

    def claims(share: float, name: str, *saves_from: str, ranks: tuple[int, ...] = (0, 1)) -> Rule:
        return rule(finding(share, ranks=ranks), name, saves_from)

    assert diagnose(job, [rule(lambda: nothing("fine"))], jobs=1).together is None
    alone = claims(0.3, "a", "computation")
    assert together(alone) == pytest.approx(0.3)
    risk = rule(finding(0.0, scope="risk"), "risk")
    assert together(alone, risk) == pytest.approx(0.3)
    # Computation takes 550 of 997 µs: no more than that, however many claim it.
    assert together(alone, claims(0.2, "b", "computation")) == pytest.approx(0.5)
    assert together(alone, claims(0.4, "b", "computation"), claims(0.45, "c", "computation")) == pytest.approx(
        550_000 / STEP_NS
    )
    # One that claims computation and more makes the two others one.
    more = claims(0.1, "b", "copy", "computation"), claims(0.5, "c", "computation"), claims(0.02, "d", "copy")
    assert together(*more) == pytest.approx(575_000 / STEP_NS)
    # Of different parts both may go.
    assert together(claims(0.1, "a", "computation"), claims(0.05, "b", "input_wait")) == pytest.approx(0.15)
    # Rank 0 hides what would be saved on rank 1, and the other way round: their sum bounds nothing.
    hidden = together(claims(0.05, "a", "computation", ranks=(0,)), claims(0.05, "b", "input_wait", ranks=(1,)))
    assert hidden == pytest.approx(650_000 / STEP_NS)
    # Nothing bounds what may come out of all parts of the step: it is not told.
    broad = [claims(0.55, name, *CATEGORIES) for name in "ab"]
    assert diagnose(job, broad, jobs=1).together is None


def test_a_change_that_two_findings_advise_is_made_once(job: Run) -> None:
    def advising(share: float, name: str, saves_from: str, mode: str = "") -> Rule:
        advised = change("Change it.", mode=(None, mode)) if mode else change("Change it.")

        def explain(_: Estimate) -> Explanation:
            return Explanation(title="Found", summary="So.", changes=(advised,))

        return replace(rule(finding(share, ranks=(0, 1)), name, (saves_from,)), explain=explain)

    def together(*rules: Rule) -> float:
        most = diagnose(job, rules, jobs=1).together
        assert most is not None
        return most.share

    graphs = advising(0.1, "a", "computation", mode="reduce-overhead")
    assert together(graphs, advising(0.05, "b", "input_wait", mode="reduce-overhead")) == pytest.approx(0.1)
    assert together(graphs, advising(0.05, "b", "input_wait", mode="max-autotune")) == pytest.approx(0.15)
    assert together(advising(0.1, "a", "computation"), advising(0.05, "b", "input_wait")) == pytest.approx(0.15)


def test_what_of_a_saving_lies_in_one_category_is_bounded_by_it(job: Run) -> None:
    def claims(share: float, name: str, within: float, *saves_from: str) -> Rule:
        said = finding(share, ranks=(0, 1), within={"input_wait": within * STEP_NS})
        return rule(said, name, saves_from)

    def together(*rules: Rule) -> float | None:
        most = diagnose(job, rules, jobs=1).together
        return most.share if most else None

    broad = ("computation", "copy", "input_wait", "host", "other")
    waits, both = claims(0.1, "a", 0.1, "input_wait"), claims(0.6, "b", 0.1, *broad)
    # Waiting takes 100 of 997 µs. What both claim of it is there once; half of the step comes out of its other parts.
    assert together(waits, both) == pytest.approx(0.5 + 100_000 / STEP_NS)
    # Were it not told, all might come out of the broad one's categories.
    assert together(waits, claims(0.6, "b", 0.0, *broad)) == pytest.approx(0.7)
    assert together(claims(0.1, "a", 0.1, *broad), claims(0.1, "b", 0.1, *broad)) == pytest.approx(100_000 / STEP_NS)


@pytest.mark.parametrize("seed", range(12))
def test_together_is_no_less_than_the_dearest_and_no_more_than_the_sum(job: Run, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rules = []
    for n in range(int(rng.integers(1, 5))):
        share = float(rng.uniform(0.03, 0.4))
        saves_from = tuple(str(c) for c in rng.choice(CATEGORIES, int(rng.integers(1, 6)), replace=False))
        within = {saves_from[0]: float(rng.uniform(0, 1.2)) * share * STEP_NS} if rng.random() < 0.5 else {}
        said = finding(share, ranks=(0, 1), within=within)
        rules.append(rule(said, f"r{n}", saves_from))
    result = diagnose(job, rules, jobs=1)
    savings = [o.saving_ns for o in result.outcomes if o.state == "found"]
    if result.together is not None:
        assert max(savings) - 1e-6 <= result.together.saving_ns <= sum(savings) + 1e-6
        assert result.together.share <= max(0.98, max(savings) / STEP_NS)
    else:
        assert sum(savings) > 0.98 * STEP_NS or not savings


def test_what_lies_between_the_steps_is_bounded_with_the_whole_loop(tmp_path: Path) -> None:
    rows = [runs.light(n, 100 * runs.MS, kind="validation" if n % 5 == 4 else "train") for n in range(40)]
    job = open_run(runs.recorded(tmp_path, (None, rows, runs.CPU)))
    rules = [rule(finding(0.1), "a"), rule(finding(0.2, scope="job"), "b")]
    most = diagnose(job, rules, jobs=1).together
    assert most is not None
    # A step of 100 ms, and 25 more of validation to each.
    assert most.saving_ns == pytest.approx(30 * runs.MS)
    assert most.share == pytest.approx(30 / 125, rel=0.05)
