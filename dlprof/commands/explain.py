"""`dlprof explain RULE`: a rule's manual."""

from __future__ import annotations

import click


@click.command(short_help="Print the manual of a rule.")
@click.argument("rule")
def explain(rule: str) -> None:
    """Print the manual of a RULE: what it looks at, when it finds something, what to change."""
    from dlprof.analysis.diagnosis import rule_named
    from dlprof.analysis.rules import RULES

    found = rule_named(RULES, rule)
    click.echo(f"{found.id}: {found.title}\n\n{found.manual}")
