"""`dlprof whatif RUN`: what the step would be with another loader, network, device or pipeline."""

from __future__ import annotations

from pathlib import Path

import click

from dlprof.commands import form, jobs, no_limits, out, quiet, rarely, run_path, show
from dlprof.errors import DlprofError, NotMeasured

_SPEED = "2x, 1.5x, or perfect"


@click.command(short_help="Predict the step with another loader, network, device or pipeline.")
@run_path
@click.option("--input", "input_", metavar="SPEED", help=f"How fast batches are made: {_SPEED} (always ready).")
@click.option("--workers", type=click.IntRange(0, 1024), help="Workers of the training loader.")
@click.option("--network", metavar="SPEED", help=f"How fast bytes move between ranks: {_SPEED}.")
@click.option("--device", metavar="SPEED", help="How fast the device computes: 2x, 1.5x.")
@out("Folder for whatif.html and whatif.json, which are else not written.")
@form
@show
@quiet
@rarely
@click.option("--host", metavar="SPEED", help="How fast a GPU's host runs Python and launches: 2x.")
@click.option("--copies", metavar="SPEED", help=f"How fast copies between host and device are: {_SPEED}.")
@click.option("--stages", type=click.Choice(["even"]), help="A pipeline's stages, all alike.")
@click.option("--microbatches", type=click.IntRange(1, 100_000), help="Micro-batches of a pipeline, of the same batch.")
@click.option("--schedule", metavar="NAME", help="A pipeline's schedule: 1F1B, GPipe, Interleaved1F1B, ...")
@jobs
@no_limits
def whatif(
    path: Path,
    input_: str | None,
    workers: int | None,
    network: str | None,
    device: str | None,
    host: str | None,
    copies: str | None,
    stages: str | None,
    microbatches: int | None,
    schedule: str | None,
    out: Path | None,
    form: str,
    jobs: int | None,
    show: bool,
    quiet: bool,
) -> None:
    """Predict what the mean step of PATH would be with something changed, by replaying what was recorded.

    Predicts each change alone, and all at once. Nothing is run. Each prediction lists what it cannot know.
    """
    from dlprof.analysis.whatif import Request, answers, factor
    from dlprof.commands.progress import Progress
    from dlprof.commands.report import print_summary, write_summary
    from dlprof.read.run import open_run
    from dlprof.report.summary import answers_json, of_answers

    speeds = {"input": input_, "network": network, "device": device, "host": host, "copies": copies}
    try:
        factors = {name: None if text is None else factor(text) for name, text in speeds.items()}
    except DlprofError as e:
        raise click.UsageError(str(e)) from None
    request = Request(
        **factors, workers=workers, stages=stages is not None, microbatches=microbatches, schedule=schedule
    )
    if not request.named:
        raise click.UsageError("name a change: --input perfect, --workers 4, --device 1.5x, ...")
    run = open_run(path)
    try:
        with Progress(quiet=quiet) as progress:
            found = answers(run, request, jobs, progress)
    except NotMeasured as e:
        raise DlprofError(f"{path}: {e}") from None
    outcome = of_answers(path.resolve().name, found)
    if out is None and not show:
        print_summary(outcome, answers_json(found), form)
    else:
        write_summary(outcome, answers_json(found), "whatif", "dlprof-whatif", out, form, show=show)
