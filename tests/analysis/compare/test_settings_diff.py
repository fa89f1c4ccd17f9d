"""The settings in which two runs differ, and what was measured otherwise."""

from __future__ import annotations

from msgspec.structs import replace

from dlprof.analysis.compare.comparison import compare
from dlprof.analysis.compare.settings_diff import differing
from dlprof.result import Fact
from tests.fixtures.comparisons import run


def test_settings_that_differ_are_told_apart_from_what_was_measured() -> None:
    a = run(
        100, facts=(Fact("Loader", "num workers", "0"), Fact("Host", "cores in use", "1"), Fact("Job", "folder", "x"))
    )
    b = run(
        100, facts=(Fact("Loader", "num workers", "2"), Fact("Host", "cores in use", "2"), Fact("Job", "folder", "y"))
    )
    b = replace(b, run=replace(b.run, command=("python", "train.py", "--workers", "2")))
    c = compare(a, b)
    assert {(s.name, s.a, s.b) for s in c.settings} == {("num workers", "0", "2"), ("command", "", "--workers 2")}
    assert [s.name for s in c.measured] == ["cores in use"]


def test_of_two_commands_only_the_words_that_differ_are_named() -> None:
    a, b = (
        replace(run(100), run=replace(run(100).run, command=words))
        for words in (("python", "a.py", "x y"), ("python", "b.py", "x y"))
    )
    ((chosen,), measured) = differing(a, b)
    assert (chosen.section, chosen.name, chosen.a, chosen.b) == ("Job", "command", "a.py", "b.py")
    assert measured == ()
