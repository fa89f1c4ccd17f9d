"""`dlprof rules` lists every rule with the first sentence of its manual."""

from click.testing import CliRunner

from dlprof.analysis.rules import RULES
from dlprof.cli import cli


def test_every_rule_has_one_line() -> None:
    done = CliRunner().invoke(cli, ["rules"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [r.id for r in RULES]
    for line, rule in zip(lines, RULES, strict=True):
        assert line.endswith(rule.manual.splitlines()[0])
        assert line.endswith(".")
