"""`dlprof explain RULE`: a rule's manual; `dlprof explain settings`: what `--set` overrides."""

from __future__ import annotations

import click

SETTINGS = "settings"


@click.command(short_help="Print the manual of a rule, or of the settings.")
@click.argument("rule", metavar="RULE|settings")
def explain(rule: str) -> None:
    """Print the manual of a RULE: what it looks at, when it finds something, what to change.

    `settings` lists what `dlprof wrap --set NAME=VALUE` overrides in a script, with values and risks.
    """
    if rule == SETTINGS:
        click.echo(_settings())
        return
    from dlprof.analysis.diagnosis import rule_named
    from dlprof.analysis.rules import RULES

    found = rule_named(RULES, rule)
    click.echo(f"{found.id}: {found.title}\n\n{found.manual}")


def _settings() -> str:
    import textwrap

    from dlprof.overrides import ENVIRONMENT, OVERRIDES

    lines = [
        "Settings that `dlprof wrap --set NAME=VALUE` overrides in an unedited script.",
        "Those that change numbers need --allow-numerics.",
    ]
    for one in (*OVERRIDES, ENVIRONMENT):
        changes = "  (changes numbers)" if one.numerics else ""
        texts = [one.help, *([f"Risk: {one.risk}"] if one.risk else [])]
        lines += ["", f"{one.name} = {one.values}{changes}"]
        lines += [
            line for text in texts for line in textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="    ")
        ]
    return "\n".join(lines)
