"""`dlprof run`: a reference workload on several ranks under torchrun, recorded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click

from dlprof.commands.wrap import Recording, record, recording_options
from dlprof.errors import DlprofError


@click.command(short_help="Run and record a reference workload.")
@click.argument("workload")
@click.option("--gpus", type=click.IntRange(min=1), help="Ranks, one a GPU.")
@click.option("--procs", type=click.IntRange(min=1), help="Ranks on the CPU, over gloo.")
@click.option("--fault", help="A fault to plant, by name; the workload's --help lists them.")
@recording_options
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    workload: str,
    gpus: int | None,
    procs: int | None,
    fault: str | None,
    recording: Recording,
    args: tuple[str, ...],
) -> None:
    """Run WORKLOAD, a path or a name in ./workloads, on several ranks and print where its time goes.

    With neither --gpus nor --procs: one rank on each GPU there is, else 2 ranks on the CPU. What stands after -- goes
    to the workload.
    """
    if gpus and procs:
        raise click.UsageError("--gpus and --procs exclude each other")
    script = find_workload(workload)
    there = 0 if procs else count_gpus()
    if gpus and gpus > there:
        raise DlprofError(
            f"--gpus {gpus}: there {'is' if there == 1 else 'are'} {there} here; --procs N runs on the CPU"
        )
    on_gpus = gpus or (there if not procs else 0)
    ranks = on_gpus or procs or 2
    env = dict(os.environ)
    if not on_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    if not recording.quiet:
        place = f"{ranks} GPU{'s' if ranks > 1 else ''}" if on_gpus else f"{ranks} CPU rank{'s' if ranks > 1 else ''}"
        click.echo(f"dlprof: {script} on {place}", err=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    planted = ["--fault", fault] if fault else []
    record(
        [*launcher, str(script), *planted, *args],
        recording,
        name=script.stem + (f"-{fault}" if fault else ""),
        env=env,
        options={"fault": fault} if fault else None,
    )


def find_workload(name: str) -> Path:
    """Give the script of a workload named by its path or by its bare name; raise DlprofError where there is none."""
    folder = Path("workloads")
    for path in (Path(name), folder / name, folder / f"{name}.py"):
        if path.is_file():
            return path
    there = ", ".join(sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")))
    raise DlprofError(
        f"no workload {name}" + (f"; in {folder} there are: {there}" if there else f" here or in {folder}")
    )


def count_gpus() -> int:
    """Count the GPUs that a job of this environment would see, without waking any of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if visible is None else [v.strip() for v in visible.split(",")]
    if chosen in ([""], ["-1"]) or shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    gpus = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")] if listed.returncode == 0 else []
    if chosen is None:
        return len(gpus)
    # CUDA stops at the first entry that names no device.
    seen = 0
    for entry in chosen:
        if not (entry.isdigit() and int(entry) < len(gpus)) and not (entry and any(entry in line for line in gpus)):
            break
        seen += 1
    return seen
