"""Each profile has a flame graph and a table of its functions."""

from __future__ import annotations

from pathlib import Path

from dlprof.analysis.panel import drawn
from dlprof.analysis.panels.host import PROFILES_PICTURE
from tests.fixtures.hosts import SEEN, with_stacks
from tests.fixtures.logged import GOLDEN
from tests.fixtures.runs import measured


def test_a_profile_of_samples() -> None:
    flame, table = drawn(measured(GOLDEN / "pyspy.speedscope.json.gz", PROFILES_PICTURE.draw), [PROFILES_PICTURE])
    assert (flame.shape, flame.unit) == ("flame", "ns")
    roots = {row[3]: row[2] for row in flame.rows if row[0] == 0}
    assert roots["waiting for the loader"] == 2_420_000_000
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert first["function"].startswith("decode (train.py")
    assert first["whose"] == "yours"


def test_a_profile_of_calls() -> None:
    flame, table = drawn(measured(GOLDEN / "calc.prof", PROFILES_PICTURE.draw), [PROFILES_PICTURE])
    assert "estimated" in flame.note
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert (first["function"], first["calls"]) == ("decode (calc.py:5)", 300)


def test_a_run_of_dlprofs_has_none(tmp_path: Path) -> None:
    assert drawn(measured(with_stacks(tmp_path, SEEN), PROFILES_PICTURE.draw), [PROFILES_PICTURE]) == ()
