"""`dlprof check-advice RUN TEXT`: would somebody's advice help this job, by what was recorded and tried?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from dlprof.commands import form, jobs, no_limits, quiet, rarely, run_path
from dlprof.files import compact


@click.command("check-advice", short_help="Hold somebody's advice against a recording.")
@run_path
@click.argument("text", nargs=-1, required=True)
@form
@quiet
@rarely
@jobs
@no_limits
def check_advice(path: Path, text: tuple[str, ...], form: str, jobs: int | None, quiet: bool) -> None:
    """Say whether TEXT, such as "use channels_last and 8 workers", would help the job of PATH, and how to measure it.

    PATH: a run, traces, or a file result.json. Nothing is run. Of each thing advised: what the rules that judge it say,
    what `dlprof try` measured, whether numbers or training change, where it goes, the command that tells.
    """
    from dlprof.analysis.source import patches
    from dlprof.commands.prove.compare import result_of
    from dlprof.commands.report import shown
    from dlprof.overrides import Value
    from dlprof.read.run import open_run
    from dlprof.report import advice
    from dlprof.result.stored import plain
    from dlprof.trial.planning import named

    folder = path if path.is_dir() else path.parent
    calls = patches.calls_of(rank.facts for rank in open_run(path).ranks) if path.is_dir() else []

    def placed(settings: Mapping[str, Value]) -> tuple[str, str]:
        wanted = list(patches.wanted_of(settings))
        there = [call for one in wanted for call in patches.sites(calls, one)]
        return (f"{there[0].file}:{there[0].line}", patches.patch(calls, wanted).shown) if there else ("", "")

    found = advice.judge(" ".join(text), advice.Recorded(result_of(path, jobs, quiet), shown(folder), named, placed))
    click.echo(compact(plain(found)) if form == "json" else advice.render(found))
