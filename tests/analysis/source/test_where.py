"""Which lines a finding names, and what its change looks like there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from msgspec.structs import replace

from dlprof.analysis.engine import Maybe
from dlprof.analysis.rules import RULES
from dlprof.analysis.source.patches import Call, Span
from dlprof.analysis.source.where import CONCERNS, Source, changes_numbers, placed, wanted
from dlprof.errors import NotMeasured
from dlprof.result import CATEGORIES, Change, Outcome, Place, change
from dlprof.result.figures import InModule

TEXT = "train = DataLoader(data)\n"
LOADER = Call("loader", "train.py", 1, "main", TEXT.strip(), roles=("train",), span=Span(1, 1, 8, 24))
HELD = Call("loader", "train.py", 2, "main", "held", roles=("validation",))
LOOP = Call("iteration", "train.py", 5, "main", "for x in train:", roles=("train",))
CHECK = Call("iteration", "train.py", 9, "check", "for x in held:", roles=("validation",))
SAVE = Call("save", "train.py", 7, "main", "torch.save(m)")
CALLS = [CHECK, HELD, LOOP, LOADER, SAVE]


def source(
    calls: Sequence[Call],
    *lines: tuple[str, bool, str, int, str, str, int, int],
    modules: Sequence[tuple[str, str, str, float]] = (),
) -> Source:
    """Return what is known of calls, of lines and of modules: none where there is no line, or no module."""

    def of_modules() -> Any:
        if not modules:
            raise NotMeasured("no module")
        return pd.DataFrame(modules, columns=["about", "path", "kind", "ns"]).assign(total_ns=10.0, rank=0)

    def known() -> Any:
        if not lines:
            raise NotMeasured("no stack")
        columns = ["doing", "own", "file", "line", "function", "library", "samples", "of"]
        return pd.DataFrame(lines, columns=columns).assign(rank=0)

    return Source(Maybe(lambda: [*calls]), Maybe(known), Maybe(of_modules))


def found(rule: str, *changes: Change) -> Outcome:
    return Outcome(rule, "found", "Found", changes=changes)


def test_a_finding_names_the_modules_that_it_is_in() -> None:
    known = source(CALLS, modules=[("float32", "head", "Linear", 8.0), ("late", "body", "Body", 10.0)])
    assert placed(found("fp32_matmul"), (), known).modules == (InModule("head", "Linear", 0.8),)
    assert placed(found("input_wait"), (), known).modules == ()
    assert placed(found("fp32_matmul"), (), source(CALLS)).modules == ()


def test_calls_come_first_and_lines_seen_in_the_phases_then() -> None:
    lines = (
        ("worker", True, "data.py", 7, "decode", "open (PIL/Image.py)", 80, 100),
        ("worker", True, "data.py", 8, "decode", "", 4, 100),
        ("worker", False, "x/y.py", 0, "f", "", 16, 100),
        ("fetch", False, "torch/z.py", 0, "wait", "", 30, 30),
        ("rest", True, "train.py", 6, "main", "", 90, 90),
    )
    where = placed(found("input_wait"), ("input_wait",), source(CALLS, *lines)).where
    assert [(w.file, w.line, w.function, w.share) for w in where] == [
        ("train.py", 1, "main", None),
        ("train.py", 5, "main", None),
        ("data.py", 7, "decode", 0.8),
        ("torch/z.py", 0, "wait", 1.0),
    ]
    assert where[2].what == "loader worker, in open (PIL/Image.py)"


def test_a_line_that_the_rule_names_is_not_named_again_for_its_call() -> None:
    named = replace(found("input_wait"), where=(Place("train.py", 1, "main", what="as the rule says"),))
    where = placed(named, ("input_wait",), source(CALLS)).where
    assert [(w.line, w.what) for w in where] == [(1, "as the rule says"), (5, LOOP.source)]


def test_of_several_calls_of_a_kind_those_made_most_often_come_first_and_a_librarys_last() -> None:
    calls = [
        Call("save", "train.py", 1, count=1),
        Call("save", "train.py", 2, count=9, via="save (fancy/x.py:1)"),
        Call("save", "train.py", 3, count=5),
        Call("save", "train.py", 4, count=3),
    ]
    assert [w.line for w in placed(found("checkpoint_stall"), (), source(calls)).where] == [3, 4, 1]
    assert [w.line for w in placed(found("checkpoint_stall"), (), source(calls[:3])).where] == [3, 1, 2]


@pytest.mark.parametrize(
    ("rule", "saves_from", "expected"),
    [
        ("validation_share", (), [9]),
        ("checkpoint_stall", (), [7]),
        ("gc_pauses", ("garbage_collection",), []),
        ("some_new_rule", ("checkpoint",), [7]),
        ("some_new_rule", (), []),
    ],
)
def test_a_rule_names_the_calls_that_concern_it(rule: str, saves_from: tuple[str, ...], expected: list[int]) -> None:
    assert [w.line for w in placed(found(rule), saves_from, source(CALLS)).where] == expected


def test_few_stacks_name_no_line() -> None:
    few = source([], ("rest", True, "train.py", 6, "main", "", 20, 20))
    assert placed(found("host_bound"), (), few).where == ()


def test_a_change_has_the_place_of_its_argument_and_its_diff(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TEXT)
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    known = Call(
        "loader", "train.py", 1, "main", "…", digest, roles=("train",), span=LOADER.span, directory=str(tmp_path)
    )
    asked = (change("more", num_workers=(0, 4)), change("less work"), change("env", OMP_NUM_THREADS=(None, 1)))
    first, *others = placed(found("input_wait", *asked), (), source([HELD, known])).changes
    assert first.at is not None
    assert (first.at.file, first.at.line, first.no_diff) == ("train.py", 1, "")
    assert "+train = DataLoader(data, num_workers=4)\n" in first.diff
    assert [c.at for c in others] == [None, None]
    (stale,) = placed(found("input_wait", asked[0]), (), source([LOADER])).changes
    assert stale.at is not None
    assert (stale.at.line, stale.diff) == (1, "")
    assert stale.no_diff == "train.py:1: what the file held was not recorded"


def test_what_changes_numbers_is_known_by_the_change_or_its_setting() -> None:
    assert changes_numbers(change("x", broadcast_buffers=(True, False)))
    assert changes_numbers(change("x", numerics=True, batch_size=(1, 2)))
    assert not changes_numbers(change("x", num_workers=(0, 2), persistent_workers=(False, True)))


def test_a_change_wants_its_keywords_by_kind_of_call() -> None:
    both = change("x", num_workers=(0, 2), fused=(None, True), OMP_NUM_THREADS=(None, 1), pin_memory=(False, None))
    assert [(w.kind, dict(w.settings)) for w in wanted(both)] == [
        ("loader", {"num_workers": 2}),
        ("optimizer", {"fused": True}),
    ]


def test_each_rule_that_is_listed_is_there() -> None:
    assert CONCERNS.keys() <= {rule.id for rule in RULES}
    for rule in RULES:
        assert rule.id in CONCERNS or set(rule.saves_from) <= set(CATEGORIES)
