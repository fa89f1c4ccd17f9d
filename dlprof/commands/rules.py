"""`dlprof rules`: the list of rules."""

from __future__ import annotations

import click


@click.command()
def rules() -> None:
    """List the bottlenecks that dlprof knows."""
    from dlprof.analysis.rules import RULES

    width = max(len(r.id) for r in RULES)
    for rule in RULES:
        click.echo(f"{rule.id:<{width}}  {rule.manual.splitlines()[0]}")
