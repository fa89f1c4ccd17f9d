"""`dlprof window RUN`: asks a job that runs for another trace window."""

from __future__ import annotations

from pathlib import Path

import click

from dlprof.commands import PATH, say


@click.command(short_help="Have a running job trace some steps again.")
@click.argument("run", type=PATH)
@click.option("--steps", type=click.IntRange(1, 1_000), default=5, show_default=True, help="How many steps to trace.")
def window(run: Path, steps: int) -> None:
    """Ask every rank of the running job RUN for another trace window.

    All ranks trace the same steps, some seconds ahead. `dlprof report RUN --window 2` reads the new traces, also while
    the job runs. A job has five windows at most.
    """
    from dlprof.live.window import ask, steps_of
    from dlprof.plain import command_line
    from dlprof.units import count

    asked = f"Asked for {count(steps, 'step')}"
    answer = ask(run, steps)
    if answer is None:
        say(f"{asked}; no rank has answered yet: they look at the end of a step.")
        return
    number = str(answer.get("number"))
    say(f"{asked}: the ranks trace {steps_of(answer)}, as window {number}.")
    say(f"Then: {command_line(['dlprof', 'report', str(run), '--window', number])}")
