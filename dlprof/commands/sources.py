"""`dlprof sources`: the formats of other tools that a report can be made of."""

from __future__ import annotations

import click


@click.command(short_help="List the files of other tools that dlprof reads.")
@click.argument("name", required=False)
def sources(name: str | None) -> None:
    """List the formats that `dlprof report` reads, alone or several in one folder; of NAME, say all that is known."""
    from dlprof.commands import say
    from dlprof.errors import DlprofError
    from dlprof.read.formats import formats

    known = {one.name: one for one in formats()}
    if name is not None and name not in known:
        raise DlprofError(f"no source {name!r}; there are: {', '.join(sorted(known))}")
    if name is not None:
        for label, text in known[name].described.items():
            say(f"{label}: {text}")
        return
    width = max(map(len, known))
    for one in known.values():
        say(f"{one.name:<{width}}  {one.title}{'' if one.read else ' (known, and not read)'}")
        say(f"{'':<{width}}    {one.left or one.brings}")
        if one.record:
            say(f"{'':<{width}}    record: {one.record}")
