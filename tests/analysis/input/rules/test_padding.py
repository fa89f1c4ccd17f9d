"""Padding: found with the step that less of it leaves, silent where there is little, and abstaining without lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.input.rules.padding import RULE
from dlprof.result import Place, Setting
from tests.fixtures.asking import ask
from tests.fixtures.padding import facts, trained
from tests.fixtures.runs import MS

MOSTLY = facts(512, [40, 20, 30, 64], [30, 60, 11, 64])


def test_found_with_the_step_that_less_padding_leaves(tmp_path: Path) -> None:
    collate = {"name": "collate", "file": "/job/train.py", "line": 17}
    found = ask(RULE, trained(tmp_path, MOSTLY, loaders=[{"role": "train", "collate": collate}]))
    assert found.state == "found"
    assert found.verdict == "92 % of the tokens are padding."
    assert found.saving_ns == pytest.approx(26 * MS * (1 - 1 / 8) + 8 * MS * (1 - 1 / 64), rel=0.01)
    assert found.advice[0].startswith("pad in `collate` (train.py:17) to the longest row of each batch, not to 512")
    assert [change.at for change in found.changes] == [Place("train.py", 17, "collate"), None, None]
    assert found.changes[0].settings == (Setting("padding", None, "longest"),)
    # Similar rows in a batch, and rows one behind the other, train differently.
    assert [change.numerics for change in found.changes] == [False, True, True]
    assert found.evidence is not None
    assert found.evidence.rows[0][:2] == ("as it is", 512)


def test_rows_that_differ_much_are_grouped(tmp_path: Path) -> None:
    found = ask(RULE, trained(tmp_path, facts(100, *([100, 20, 10, 90] for _ in range(8)))))
    assert found.state == "found"
    assert "group_by_length" in found.advice[0]
    assert found.changes[0].numerics


@pytest.mark.parametrize(
    "seen",
    [
        facts(100, [100] * 4, [100] * 4),
        facts(100, [100, 90, 80, 92], [100, 85, 88, 95]),  # 9 % of padding, of which grouping leaves a part
        facts(128, [127, 128, 128, 126]),
    ],
)
def test_little_padding_is_clear(tmp_path: Path, seen: list[dict[str, Any]]) -> None:
    found = ask(RULE, trained(tmp_path, seen))
    assert (found.state, found.summary.endswith("of the tokens are padding")) == ("clear", True)


def test_a_loader_of_a_library_is_named_by_what_it_is(tmp_path: Path) -> None:
    collate = {"name": "DataCollatorWithPadding", "file": "/lib/site-packages/transformers/c.py", "line": 225}
    found = ask(RULE, trained(tmp_path, MOSTLY, loaders=[{"role": "train", "collate": collate}]))
    assert found.advice[0].startswith("pad in the loader to the longest row")


def test_without_lengths_nothing_is_said(tmp_path: Path) -> None:
    old = ask(RULE, trained(tmp_path / "old", None))
    assert (old.state, "were not recorded" in old.why) == ("not_measured", True)
    assert ask(RULE, trained(tmp_path / "images", [])).state == "does_not_apply"
