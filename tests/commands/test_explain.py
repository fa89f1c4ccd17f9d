"""`dlprof explain` prints manuals of rules, formats and settings, and what a rule stands on."""

import re

import pytest
from click.testing import CliRunner

from dlprof.analysis.engine import all_needed
from dlprof.analysis.estimate import Rule
from dlprof.analysis.rules import RULES
from dlprof.cli import cli
from dlprof.commands.explain import LISTS
from dlprof.overrides import OVERRIDES
from dlprof.read.formats import formats
from dlprof.schema import TABLES
from tests.fixtures.places import ROOT


def told(*words: str) -> list[str]:
    done = CliRunner().invoke(cli, ["explain", *words])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_the_whole_manual_is_printed() -> None:
    for rule in RULES:
        assert "\n".join(told(rule.id)) == f"{rule.id}: {rule.title}\n\n{rule.manual}"


def test_a_rule_that_is_not_there_is_answered_with_those_that_are() -> None:
    done = CliRunner().invoke(cli, ["explain", "input-wait"])
    assert done.exit_code == 1
    for name in (*LISTS, *(rule.id for rule in RULES), *(one.name for one in formats())):
        assert name in done.stderr


def test_a_setting_is_listed_with_its_values_and_its_risk() -> None:
    listed = "\n".join(told("settings")).split("\n\n")
    for override in OVERRIDES:
        (entry,) = (part for part in listed if part.startswith(f"{override.name} = "))
        assert ("changes numbers" in entry.splitlines()[0]) is override.numerics
        text = " ".join(entry.split())
        assert all(part in text for part in (override.values, override.help, override.risk))
        assert ("Risk:" in text) is bool(override.risk)


@pytest.mark.parametrize("words", [[], ["rules"]])
def test_every_rule_has_one_line(words: list[str]) -> None:
    lines = told(*words)
    assert [line.split()[0] for line in lines] == [r.id for r in RULES]
    assert all(line.endswith(rule.manual.splitlines()[0]) for line, rule in zip(lines, RULES, strict=True))


def test_every_format_is_listed_and_says_all_that_is_known_of_it() -> None:
    lines = told("sources")
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [one.name for one in formats()]
    (horovod,) = (one for one in formats() if one.name == "horovod")
    assert told("horovod") == [f"{label}: {text}" for label, text in horovod.described.items()]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.id)
def test_what_a_rule_stands_on_ends_at_tables_and_their_recorders(rule: Rule) -> None:
    head, *lines, legend = told(rule.id, "--needs")
    assert (head.split()[0], legend) == (rule.id, "?: it may be lacking")
    shown = [re.fullmatch(r"[│ ├└─]*(\w+)\??  (.*)", line) for line in lines]
    assert None not in shown
    found = [match.groups() for match in shown if match]
    assert {name for name, place in found if not place.startswith("table, ")} == {
        measure.name for measure in all_needed([rule.check, rule.explain])
    }
    for name, place in found:
        file, _, line = place.rpartition(":")
        if place.startswith("table, "):
            assert name in TABLES
        elif place != "see above":
            assert any(
                text.startswith(f"def {name}(") for text in (ROOT / file).read_text().splitlines()[int(line) - 1 :][:4]
            )
