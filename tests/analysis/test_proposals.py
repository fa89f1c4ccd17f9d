"""What findings propose, in order: each change is counted after those above it, of the step, the job or the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis import idioms
from dlprof.analysis.engine import Maybe
from dlprof.analysis.proposals import Basis, Found, combined_saving, pieces, proposals, speedup
from dlprof.errors import NotMeasured
from dlprof.result import Outcome, Place, RunPart, change
from tests.fixtures.runs import MS

# What the mean step of 100 ms consists of, ms; of two ranks one waits 20 and the other 40. A step of the loop is 110
# long, and of the run 120.
STEP = {"input_wait": 30.0, "host": 20.0, "computation": 50.0}
BUDGET = (RunPart("steady", 10, 1_000 * MS, 0.83), RunPart("setup", 0, 200 * MS, 0.17))


def lacking() -> Any:
    raise NotMeasured("not here")


def basis() -> Basis:
    rows = [(rank, category, ms * MS) for rank in (0, 1) for category, ms in STEP.items()]
    frame = pd.DataFrame(rows, columns=["rank", "category", "ns"])
    frame.loc[frame["category"] == "input_wait", "ns"] = [20.0 * MS, 40.0 * MS]
    known: Any = {name: Maybe(lacking) for name in Basis.__struct_fields__}
    known |= {
        "job": SimpleNamespace(ranks=(0, 1)),
        "mean_step_ns": Maybe(lambda: 100.0 * MS),
        "loop_step_ns": Maybe(lambda: 110.0 * MS),
        "run_step_ns": Maybe(lambda: 120.0 * MS),
        "breakdown": Maybe(lambda: frame),
    }
    return Basis(**known)


def found(to: str, saves: dict[str, float], error: float = 0.0, **more: Any) -> Found:
    """Return a finding that setting `a` cures: what it saves of categories, ms, several with spaces between them."""
    cure = change(f"`a={to}`", training=more.get("training", False), a=("", to))
    outcome = Outcome(
        f"rule_{to}", "found", "", saving_ns=sum(saves.values()) * MS, error_ns=error * MS, changes=(cure,), **more
    )
    return outcome, [(frozenset(of.split()), ms * MS) for of, ms in saves.items()]


WAITS, PYTHON = found("waits", {"input_wait": 20}), found("python", {"host": 10})
# Of each proposal: its setting, the time before and after it, and of the whole job, ms.
PROPOSED: dict[str, tuple[list[Found], list[tuple[Any, ...]]]] = {
    "one": ([WAITS], [("waits", 100, 80, 1200, 1000)]),
    "two of different parts": ([WAITS, PYTHON], [("waits", 100, 80, 1200, 1000), ("python", 80, 70, 1000, 900)]),
    # 20 of the 30 are gone: of what the second one saves a third is left.
    "two of one part": (
        [WAITS, found("more", {"input_wait": 15})],
        [("waits", 100, 80, 1200, 1000), ("more", 80, 75, 1000, 950)],
    ),
    "two parts, one of them taken": (
        [WAITS, found("both", {"input_wait": 9, "host": 6})],
        [("waits", 100, 80, 1200, 1000), ("both", 80, 71, 1000, 910)],
    ),
    "the same change twice": ([WAITS, found("waits", {"host": 5})], [("waits", 100, 80, 1200, 1000)]),
    "of the loop": ([found("loop", {"host": 11}, scope="job")], [("loop", 110, 99, 1200, 1090)]),
    "of the loop after the step": (
        [WAITS, found("loop", {"host": 9}, scope="job")],
        [("waits", 100, 80, 1200, 1000), ("loop", 90, 81, 1000, 910)],
    ),
    "next to nothing": ([WAITS, found("little", {"host": 0.4})], [("waits", 100, 80, 1200, 1000)]),
    "half a percent": ([found("little", {"host": 0.6})], [("little", 100, 99.4, 1200, 1194)]),
    "the training's last": (
        [found("epochs", {"computation": 40}, training=True), WAITS, PYTHON],
        [("waits", 100, 80, 1200, 1000), ("python", 80, 70, 1000, 900), ("epochs", 70, 30, 900, 500)],
    ),
}


@pytest.mark.parametrize("case", PROPOSED)
def test_each_change_is_counted_after_those_above_it(case: str) -> None:
    findings, expected = PROPOSED[case]
    made: Any = proposals(basis(), findings, (), BUDGET)
    told: Any = [(p.change.settings[0].to, p.before_ns, p.after_ns, p.job_before_ns, p.job_after_ns) for p in made]
    assert [(name, *(ns / MS for ns in times)) for name, *times in told] == [
        (name, *(pytest.approx(ms) for ms in times)) for name, *times in expected
    ]
    assert [p.speedup for p in made] == [pytest.approx(before / after) for _, before, after, *_ in expected]


@pytest.mark.parametrize(
    ("remedy", "function", "proposed"),
    [
        ("recurrence_by_hand", "unrolled", [("unrolled", 20)]),
        ("recurrence_by_hand", "another", [("unrolled", 20), ("another", 10)]),
        ("jacobian_by_rows", "unrolled", [("unrolled", 20), ("unrolled", 10)]),
    ],
)
def test_lines_of_one_function_that_do_the_same_are_changed_together(
    remedy: str, function: str, proposed: list[tuple[str, int]]
) -> None:
    findings = []
    for line, name, of, ns in ((18, "unrolled", "computation", 20), (15, function, "host", 10)):
        what = idioms.BY_NAME[remedy if line == 15 else "recurrence_by_hand"]
        cure = change(f"{what.remedy}: {name} (train.py:{line})")
        outcome = Outcome(
            f"rule_{line}", "found", "", saving_ns=ns * MS, changes=(cure,), where=(Place("train.py", line, name),)
        )
        findings.append((outcome, [(frozenset({of}), ns * MS)]))
    made = proposals(basis(), findings, (), ())
    assert [(p.change.text.split(": ")[-1].split(" ")[0], (p.before_ns - p.after_ns) / MS) for p in made] == proposed


def test_the_error_of_a_gain_shrinks_with_what_is_left_of_it() -> None:
    first, second = proposals(basis(), [WAITS, found("more", {"input_wait": 15}, error=9)], (), ())
    assert (first.low, first.job_before_ns) == (None, None)
    assert [second.low, second.high] == pytest.approx([80 / 78, 80 / 72])  # 5 of 15 are left: 3 of 9


def test_what_a_gain_comes_out_of_is_divided_by_what_is_there() -> None:
    (made,) = proposals(basis(), [found("all", {"input_wait": 6, "host computation": 14})], (), ())
    assert made.takes == {
        of: pytest.approx(ms * MS) for of, ms in {"input_wait": 6, "host": 4, "computation": 10}.items()
    }


def test_together_they_save_their_sum_and_of_one_change_the_larger() -> None:
    together = combined_saving(basis(), [WAITS, PYTHON, found("waits", {"host": 5})])
    assert together is not None
    assert [together.saving_ns, together.share] == pytest.approx([30 * MS, 0.3])
    assert combined_saving(basis(), [found("all", {"computation": 100})]) is not None
    assert combined_saving(basis(), [found("all", {"computation": 60}), found("b", {"host": 39.9})]) is None


@pytest.mark.parametrize(
    ("within", "split"),
    [
        ({"a": 4.0}, [("a", 4), ("bc", 6)]),
        ({"a": -1.0}, [("a", 0), ("bc", 10)]),
        ({"a": 12.0}, [("a", 10)]),
        ({"a": 4.0, "b": 3.0}, [("a", 4), ("b", 3), ("c", 3)]),
        ({"a": 4.0, "b": 3.0, "c": 2.0}, [("a", 4), ("b", 3), ("c", 2), ("abc", 1)]),
    ],
)
def test_a_saving_is_split_by_what_is_known_of_it(within: dict[str, float], split: list[tuple[str, float]]) -> None:
    rule: Any = SimpleNamespace(saves_from=("a", "b", "c"))
    assert pieces(rule, 10.0, within) == [(frozenset(of), ns) for of, ns in split]


@pytest.mark.parametrize(("share", "times"), [(0.0, 1.0), (0.5, 2.0), (1.0, 1e6)])
def test_how_many_times_faster(share: float, times: float) -> None:
    assert speedup(share) == pytest.approx(times)
