"""`dlprof run`: a reference workload on several ranks under torchrun, recorded."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlprof.commands.configured import CONFIG
from dlprof.commands.recording import Recording, recording_options
from dlprof.commands.wrap import record
from dlprof.errors import RefusedError
from dlprof.units import count

if TYPE_CHECKING:
    import ast

# They are training scripts and no part of the package.
NO_WORKLOADS = "none are here; they are in the folder workloads of dlprof's repository: run from a clone of it"


def print_list(ctx: click.Context, _param: click.Parameter, given: bool) -> None:
    """Print every workload, what it covers, and its faults with the rule that must notice each; then end."""
    if not given or ctx.resilient_parsing:
        return
    scripts = workloads()
    if not scripts:
        raise RefusedError(NO_WORKLOADS)
    for script in scripts:
        faults = constant(script, "FAULTS") or {}
        click.echo(f"{script.stem}: {covers(script)}")
        for fault, rule in faults.items():
            click.echo(f"    {fault:<{max(map(len, faults))}}  {rule}")
    ctx.exit()


@click.command(short_help="Run and record a reference workload.", context_settings={"ignore_unknown_options": True})
@click.argument("workload")
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_list,
    help="List the workloads, and the faults of each with the rule that must notice it.",
)
@click.option("--gpus", type=click.IntRange(min=1), help="Ranks, one a GPU.")
@click.option("--procs", type=click.IntRange(min=1), help="Ranks on the CPU, over gloo.")
@click.option("--fault", help="A fault to plant, by name; --list shows them.")
@recording_options
@click.option("--ceiling", is_flag=True, help="With a model that costs next to nothing: how fast the loader can be.")
@click.option(
    "--ladder", is_flag=True, help="Record it several times, each time with one change more, and compare these."
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    workload: str,
    gpus: int | None,
    procs: int | None,
    fault: str | None,
    ceiling: bool,
    ladder: bool,
    recording: Recording,
    args: tuple[str, ...],
) -> None:
    """Run WORKLOAD, a path or a name that --list shows, on several ranks and print where its time goes.

    With neither --gpus nor --procs: one rank on each GPU there is, else 2 ranks on the CPU; those that are no
    distributed job have one. Options after WORKLOAD that are none of these go to the workload (--steps 50), and so does
    all that stands after --.
    """
    if workload.startswith("-"):
        raise click.UsageError(f"no such option: {workload} (a workload's own options stand after its name)")
    if gpus and procs:
        raise click.UsageError("--gpus and --procs exclude each other")
    script = find_workload(workload)
    known = constant(script, "FAULTS")
    if fault and known and fault not in known:
        raise RefusedError(f"{script.stem} has no fault {fault}; there are: {', '.join(known)}")
    if ceiling:
        args = ("--ceiling", *args)  # a workload without it reports that
    if ladder:
        _climb(script, gpus, procs, recording, args)
        return
    usual = constant(script, "RANKS")
    there = 0 if procs else count_gpus()
    if gpus and gpus > there:
        raise RefusedError(
            f"--gpus {gpus}: there is no more than {count(there, 'GPU')} here; --procs N runs on the CPU"
        )
    on_gpus = gpus or min(there, usual or there)
    ranks = on_gpus or procs or usual or 2
    if why := _lacking(script, fault, on_gpus=bool(on_gpus), ranks=ranks):
        raise RefusedError(why)
    if fault:  # with what it needs to cost more than a little; the user's options come last, and win
        args = (*str((constant(script, "SHOWN_WITH") or {}).get(fault, "")).split(), *args)
    env = dict(os.environ)
    if not on_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    words = [*(["--fault", fault] if fault else []), *args]
    ours = script.resolve().parent == _ours()
    if ours and words and (why := _usage_error(script, words, env, ranks)):
        raise RefusedError(f"{script.stem}: {why} ({script} --help lists its options)")
    if not recording.quiet:
        click.echo(
            f"dlprof: {' '.join((str(script), *args))} on {count(ranks, 'GPU' if on_gpus else 'CPU rank')}", err=True
        )
    if ours:  # their options take no secrets
        recording = replace(recording, keep_arguments=True)
    command = [*launcher(script, ranks), str(script), *words]
    name = script.stem + (f"-{fault}" if fault else "")
    record(command, recording, name=name, env=env, options={"fault": fault} if fault else None)


def _lacking(script: Path, fault: str | None, *, on_gpus: bool, ranks: int) -> str:
    """Return why a workload cannot run so here, by what it says itself (`constant`); "" where nothing is known."""
    for module, how in (constant(script, "NEEDS") or {}).items():
        if importlib.util.find_spec(module) is None:
            return f"{script.stem} needs {module}: {how}"
    if fault in (constant(script, "NEEDS_GPU") or ()) and not on_gpus:
        return f"{script.stem} --fault {fault} needs a GPU: a CPU cannot show it"
    if fault in (constant(script, "NEEDS_TWO_RANKS") or ()) and ranks < 2:
        return f"{script.stem} --fault {fault} needs two ranks: --procs 2, or --gpus 2"
    return ""


def _usage_error(script: Path, words: Sequence[str], env: Mapping[str, str], ranks: int) -> str:
    """Return what a workload of ours says against its options, else under the traceback of torchrun; "" if nothing."""
    reads = f"import sys; sys.path.insert(0, {str(script.parent)!r}); import {script.stem}; {script.stem}.parse()"
    alone = {**env, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    done = subprocess.run(
        [sys.executable, "-c", reads, *words], env=alone, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.stderr.rpartition("error: ")[2].strip() if done.returncode == 2 else ""


def _climb(script: Path, gpus: int | None, procs: int | None, recording: Recording, args: Sequence[str]) -> None:
    """Record a workload with the changes of its LADDER, one more each time, and print what each gave.

    A change with which the workload fails is left out of those that follow. Raises RefusedError if it has no ladder.
    """
    from dlprof.commands.prove.compare import compare_runs
    from dlprof.files import writing
    from dlprof.record.launch.folder import make_first, numbered

    rungs = constant(script, "LADDER")
    if not rungs:
        raise RefusedError(f"{script.stem} has no ladder: it sets no LADDER")
    most = gpus or procs or (min(count_gpus(), 2) or 2)
    on = ["--gpus"] if gpus or (not procs and count_gpus()) else ["--procs"]
    usual = recording.out or Path("runs", f"{script.stem}-ladder-{time.strftime('%Y%m%d-%H%M%S')}")
    with writing(str(usual)):
        folder = make_first(numbered(usual)) or usual
    overridden = [word for setting in recording.settings for word in ("--set", setting)]
    overridden += ["--allow-numerics"] if recording.allow_numerics else []
    kept, done = list[str](), list[Path]()
    os.environ[CONFIG] = ""  # these words say all
    ranks = 1
    for n, (name, words) in enumerate(rungs.items(), 1):
        more = [most] if "ranks" in words.split() else []
        options = [*kept, *(word for word in words.split() if word != "ranks")]
        run = folder / f"{n}-{name}"
        command = [sys.executable, "-m", "dlprof", "run", str(script), *on, str(more[0] if more else ranks)]
        command += ["-o", str(run), "--quiet", "--no-report", *overridden, "--", *options, *args]
        if not recording.quiet:
            click.echo(f"dlprof: {name}: {' '.join(options)}", err=True)
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode
        if ended:
            click.echo(f"dlprof: {name} is left out: it ended with exit code {ended}", err=True)
            continue
        kept, ranks = options, more[0] if more else ranks
        done.append(run)
    compare_runs(done, folder, "text", None, show=False, quiet=recording.quiet)


def launcher(script: Path, ranks: int) -> list[str]:
    """Return the words that start a workload's ranks: torchrun's, or those of the launcher that it names.

    Where that is not installed, the workload is started under torchrun and itself prints what it needs.
    """
    if own := constant(script, "LAUNCHER"):
        name, *words = own
        places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        if found := shutil.which(name, path=places):
            return [found, *words, str(ranks), sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def find_workload(name: str) -> Path:
    """Return the script of a workload named by its path or by its bare name; raise RefusedError if there is none."""
    if Path(name).is_file():
        return Path(name)
    scripts = workloads()
    if found := [script for script in scripts if name in (script.stem, script.name)]:
        return found[0]
    there = ", ".join(script.stem for script in scripts)
    raise RefusedError(f"no workload {name}; there are: {there}" if there else f"no workload {name}: {NO_WORKLOADS}")


def _ours() -> Path:
    return Path(__file__).resolve().parents[2] / "workloads"


def workloads() -> list[Path]:
    """List the scripts in ./workloads and in the repository that this dlprof runs from, those here first of a name."""
    found: dict[str, Path] = {}
    for folder in (Path("workloads"), _ours()):
        for script in folder.glob("*.py"):
            if not script.name.startswith("_"):
                found.setdefault(script.stem, script)
    return [found[name] for name in sorted(found)]


def constant(script: Path, name: str) -> Any:
    """Return the literal that a workload sets a name to, without running it; None if it sets no such name.

    FAULTS: of each fault, the rule that must notice it. RANKS: how many it is made for, where any other number is odd.
    LAUNCHER: what starts its ranks where torchrun does not, and its options up to their number. NEEDS: the modules that
    it imports beside torch and NumPy, each with what installs it. NEEDS_GPU, NEEDS_TWO_RANKS: faults. SHOWN_WITH: of a
    fault, the options with which it costs more than a little.
    """
    import ast

    for node in _parsed(script).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    return None


def covers(script: Path) -> str:
    """Return the first sentence of a workload's docstring, without its word on faults; empty where it has none."""
    import ast

    first = (ast.get_docstring(_parsed(script)) or "").partition("\n")[0]
    return first.partition(", well,")[0].rstrip(".")


def _parsed(script: Path) -> ast.Module:
    import ast

    try:
        return ast.parse(script.read_bytes(), str(script))
    except (OSError, SyntaxError, ValueError) as e:
        raise RefusedError(f"{script} is no Python script that can be read: {e}") from None


def count_gpus() -> int:
    """Count the GPUs that a job of this environment would see, without waking any of them."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    gpus = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")] if listed.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(gpus)

    def names_a_gpu(entry: str) -> bool:
        if entry.isdigit():
            return int(entry) < len(gpus)
        return entry not in ("", "-1") and any(entry in line for line in gpus)

    # CUDA stops at the first entry that names no device.
    return len(list(takewhile(names_a_gpu, map(str.strip, visible.split(",")))))
