"""`dlprof explain RULE` prints the manual of a rule, `dlprof explain settings` the settings that can be overridden."""

import pytest
from click.testing import CliRunner

from dlprof.analysis.estimate import Rule
from dlprof.analysis.rules import RULES
from dlprof.cli import cli
from dlprof.overrides import OVERRIDES, Override


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.id)
def test_the_whole_manual_is_printed(rule: Rule) -> None:
    done = CliRunner().invoke(cli, ["explain", rule.id])
    assert done.exit_code == 0
    assert done.stdout == f"{rule.id}: {rule.title}\n\n{rule.manual}\n"


def test_a_rule_that_is_not_there_is_answered_with_those_that_are() -> None:
    done = CliRunner().invoke(cli, ["explain", "input-wait"])
    assert done.exit_code == 1
    for rule in RULES:
        assert rule.id in done.stderr


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda o: o.name)
def test_a_setting_is_listed_with_its_values_and_its_risk(override: Override) -> None:
    done = CliRunner().invoke(cli, ["explain", "settings"])
    assert done.exit_code == 0
    (entry,) = (part for part in done.stdout.split("\n\n") if part.startswith(f"{override.name} = "))
    assert ("changes numbers" in entry.splitlines()[0]) is override.numerics
    text = " ".join(entry.split())
    assert override.values in text
    assert override.help in text
    assert override.risk in text
    assert ("Risk:" in text) is bool(override.risk)


def test_no_rule_has_the_name_of_that_list() -> None:
    assert "settings" not in {rule.id for rule in RULES}
