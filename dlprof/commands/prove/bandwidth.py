"""`dlprof bandwidth`: how fast the ranks exchange, by collective and size."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import PATH, file, form, quiet, say
from dlprof.errors import DlprofError

if TYPE_CHECKING:
    from dlprof.result.bandwidth import Bandwidth
    from dlprof.trial.bandwidth.plan import Plan
    from dlprof.trial.bandwidth.results import Raw

# Where runs are recorded to, if nothing else is asked: the reports on them look there.
_RUNS = Path("runs")


@click.command(short_help="Measure how fast ranks exchange, by collective and size.")
@click.option("--procs", type=click.IntRange(2, 1024), help="Start so many ranks here, on the CPU, over gloo.")
@click.option("--gpus", type=click.IntRange(2, 1024), help="Start so many ranks here, one a GPU.")
@click.option(
    "--sizes", default="1K..256M", show_default=True, help="Bytes: 64K,1M or 1K..256M, by factors of 4, or *2."
)
@click.option("--collectives", metavar="NAMES", help="By commas. [default: all five]")
@click.option(
    "--iterations", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Samples of each size."
)
@click.option("--warmup", type=click.IntRange(1, 10_000), default=5, show_default=True, help="Calls before them.")
@click.option("--dtype", default="float32", show_default=True, help="Type of the elements, as torch names it.")
@click.option(
    "--backend", type=click.Choice(["nccl", "gloo"]), help="What exchanges. [default: nccl where there are GPUs]"
)
@click.option(
    "--seconds", type=click.FloatRange(1, 86_400), default=60.0, show_default=True, help="How long it may take."
)
@click.option(
    "--timeout",
    type=click.FloatRange(1, 86_400),
    default=60.0,
    show_default=True,
    help="Seconds that ranks wait for each other.",
)
@click.option("--into", type=PATH, metavar="RUN", help="Save it into the folder of a run or of traces.")
@file("--out", "Save it as FILE. [default: a file of its backend and shape in runs/]")
@form
@quiet
def bandwidth(
    procs: int | None,
    gpus: int | None,
    sizes: str,
    collectives: str | None,
    iterations: int,
    warmup: int,
    dtype: str,
    backend: str | None,
    seconds: float,
    timeout: float,
    into: Path | None,
    out: Path | None,
    form: str,
    quiet: bool,
) -> None:
    """Measure all-reduce, all-gather, reduce-scatter, all-to-all and sending to the next rank, as nccl-tests does.

    \b
    dlprof bandwidth --gpus 4
    srun dlprof bandwidth
    torchrun --nproc-per-node 8 --nnodes 2 … -m dlprof bandwidth

    Starts ranks on this host, or is one of a launcher's ranks, of which rank 0 prints. Reports on the runs in runs/
    then hold their links against what was measured here, also where no data sheet knows what they can carry.
    """  # noqa: D301 - \b keeps these lines apart in click's help
    from dlprof.record.ranks import find_size
    from dlprof.trial.bandwidth import plan as plans

    if procs and gpus:
        raise click.UsageError("--gpus and --procs exclude each other")
    if into and out:
        raise click.UsageError("--into and --out exclude each other")
    launched = find_size() or 1
    if launched > 1 and (procs or gpus):
        raise click.UsageError("a launcher has started this: it says how many ranks there are")
    if dtype not in plans.DTYPES:
        raise click.UsageError(f"--dtype {dtype}: it is one of {', '.join(plans.DTYPES)}")
    try:
        plan = plans.Plan(
            sizes=plans.sizes(sizes),
            collectives=plans.collectives(collectives) if collectives else plans.COLLECTIVES,
            iterations=iterations,
            warmup=warmup,
            dtype=dtype,
            backend=backend or "",
            seconds=seconds,
            timeout_s=timeout,
        )
    except DlprofError as e:
        raise click.UsageError(str(e)) from None
    if find_spec("torch") is None:
        raise DlprofError("this Python has no torch, whose collectives are measured")
    if into and not into.is_dir():
        raise DlprofError(f"--into {into}: there is no such folder")
    raw = _of_launcher(plan, quiet) if launched > 1 else _started(plan, procs, gpus, quiet)
    if raw is None:  # another rank prints
        return
    from dlprof.trial.bandwidth.results import summed

    _print(summed(raw, plan), into, out, form)


def _of_launcher(plan: Plan, quiet: bool) -> Raw | None:
    # Read once torch is imported. Where a rank is missing, its warnings come in dozens beside the line that says so.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from dlprof.trial.bandwidth.taking_part import in_launcher

    return in_launcher(plan, lambda line: None if quiet else say(f"dlprof: {line}", err=True))


def _started(plan: Plan, procs: int | None, gpus: int | None, quiet: bool) -> Raw:
    """Start ranks here and return what they measured; end with 128 and the signal's number where one asks for that."""
    from dlprof.commands.run import count_gpus
    from dlprof.trial.bandwidth.starting import StoppedError, environment, run_here
    from dlprof.trial.stopping import stopping
    from dlprof.units import count

    there = 0 if procs or plan.backend == "gloo" else count_gpus()
    if gpus and gpus > there:
        raise DlprofError(f"--gpus {gpus}: there is no more than {count(there, 'GPU')} here; --procs N runs on the CPU")
    ranks = gpus or procs or (there if there > 1 else 2)
    on_gpus = bool(gpus or (not procs and there > 1))
    if not quiet:
        say(f"dlprof: {count(ranks, 'GPU' if on_gpus else 'CPU rank')}, at most {plan.seconds:g} s", err=True)
    with stopping() as asks:
        try:
            return run_here(plan, ranks, environment(os.environ, ranks, on_gpus=on_gpus), quiet, asks)
        except StoppedError:
            raise SystemExit(128 + asks.by) from None


def _print(measured: Bandwidth, into: Path | None, out: Path | None, form: str) -> None:
    """Print the table, save the measurement, and fail with exit code 1 where a result was wrong, or there is none."""
    from dlprof.commands.report import print_summary, shown
    from dlprof.files import compact, write, writing
    from dlprof.report.compare.bandwidth import summary
    from dlprof.result.bandwidth import to_json

    data = to_json(measured)
    print_summary(summary(measured), data, form)
    if not any(t.ns for t in measured.timings):
        raise DlprofError("nothing was measured")
    path = out or (into or _RUNS) / measured.file
    with writing(str(path), "; --out names another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, compact(data))
    if form != "json":
        say(f"saved: {shown(path)}")
    if measured.warnings:
        raise DlprofError(measured.warnings[0])
