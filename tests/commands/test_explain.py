"""`dlprof explain RULE` prints the manual of a rule."""

import pytest
from click.testing import CliRunner

from dlprof.analysis.estimate import Rule
from dlprof.analysis.rules import RULES
from dlprof.cli import cli


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
