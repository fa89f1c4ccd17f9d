"""What `dlprof fix` is worth, from a script to a patch and its gain: `python -m benchmarks.fixes OUT.json`.

Each script is copied into a repository of its own, where `dlprof fix` runs as a user would start it. Its patch is
applied with `git apply`, and the script then runs with and without it in turn: the gain must lie in the interval that
was printed. A script that has nothing to gain must get no patch. Needs a quiet machine, and five minutes a script.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dlprof.trial.job import Job
from dlprof.trial.measuring import Steps, log_ratio
from dlprof.trial.running import Runner

SCRIPTS = Path(__file__).with_name("scripts")
CAUSES = Path(__file__).parents[1] / "causes" / "scripts"
PAIRS, STEPS, SECONDS, LIMIT_S = 3, 60, 6.0, 120.0


@dataclass(frozen=True)
class Case:
    """A script with its arguments, and the files beside it; `fix`: options of `dlprof fix`."""

    script: str
    what: str
    arguments: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Where the script is."""
        return next(
            folder / f"{self.script}.py" for folder in (SCRIPTS, CAUSES) if (folder / f"{self.script}.py").exists()
        )


CASES = (
    Case("literal", "no workers, as a literal in the call"),
    Case("option", "no workers, the default of an option of argparse"),
    Case("settings", "no workers, a field of a dataclass"),
    Case("config", "no workers, a key of a YAML file", ("config.yaml",), ("config.yaml",)),
    Case("optimizer", "an optimizer that updates each parameter by itself"),
    Case("threads", "one thread on two cores"),
    Case("images", "convolutions in NCHW", fix=("--allow-numerics",)),
    Case("workers_in_memory", "two workers for samples that are in memory"),
    Case("small_tensors", "workers that send many small tensors"),
    Case("cache_lost", "workers that start anew each epoch and lose their cache"),
    Case("healthy_table", "nothing is wrong"),
    Case("healthy_images", "nothing is wrong"),
)


def run_one(case: Case, minutes: float) -> dict[str, Any]:
    """Return what became of a case."""
    with tempfile.TemporaryDirectory() as name:
        plain, patched = Path(name, "plain"), Path(name, "patched")
        plain.mkdir()
        shutil.copy(case.path, plain / f"{case.script}.py")
        for file in case.beside:
            shutil.copy(SCRIPTS / file, plain / file)
        if case.path.parent == CAUSES:
            shutil.copy(CAUSES / "clock.py", plain / "clock.py")
        _git(plain, "init", "-q")
        _git(plain, "add", ".")
        _git(plain, "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-qm", "as it was")
        words = [sys.executable, "-m", "dlprof.cli", "fix", "--minutes", f"{minutes:g}", "--format", "json", "--quiet"]
        words += [*case.fix, "-o", str(Path(name, "run")), f"{case.script}.py", *case.arguments]
        began = time.monotonic()
        done = subprocess.run(words, cwd=plain, capture_output=True, text=True, check=False)
        row: dict[str, Any] = {"case": case.script, "what": case.what, "minutes": (time.monotonic() - began) / 60}
        if done.returncode:
            return row | {"error": done.stderr.strip().splitlines()[-1:] or done.returncode}
        said = json.loads(done.stdout)
        best = said["best"]
        row |= {
            "state": said["state"],
            "runs": said["runs"],
            "words": said["fix"]["words"],
            "lines": said["fix"]["lines"],
        }
        row["kept"] = best and best["settings"]
        if best is None:
            return row
        row |= {"printed": best["measured"], "losses": best["losses"]}
        if said["fix"]["patch"] is None:
            return row
        changed = _git(plain, "status", "--porcelain", "--untracked-files=no")
        shutil.copytree(plain, patched)
        applied = subprocess.run(["git", "apply", said["fix"]["patch"]], cwd=patched, capture_output=True, check=False)
        row |= {"applies": applied.returncode == 0, "untouched": not changed}
        return row | (_measured(case, plain, patched, Path(name)) if row["applies"] else {})


def _measured(case: Case, plain: Path, patched: Path, folder: Path) -> dict[str, Any]:
    """Return the gain of the patched script, from pairs of runs of both in turn."""
    ratios = []
    for pair in range(PAIRS):
        before, after = (_run(case, cwd, folder / f"{pair}-{cwd.name}") for cwd in (plain, patched))
        ratios.append(log_ratio(before, after, "step"))
    error = statistics.stdev(ratios) / math.sqrt(PAIRS)
    return {"measured": math.exp(statistics.mean(ratios)), "measured_error": error}


def _run(case: Case, cwd: Path, folder: Path) -> Steps:
    folder.mkdir()
    job = Job((sys.executable, f"{case.script}.py", *case.arguments), cwd, dict(os.environ), {})
    done = Runner(job, folder, STEPS, lambda: False, SECONDS)({}, LIMIT_S)
    if not isinstance(done, Steps):
        raise click.ClickException(f"{case.script}: {done.why}")
    return done


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--minutes", default=5.0, help="As for `dlprof fix`.")
@click.option("--only", multiple=True, help="Only this script. Repeatable.")
def main(out: Path, minutes: float, only: tuple[str, ...]) -> None:
    """Run the cases, and write what became of them to OUT; those that are there already are not run again."""
    rows = json.loads(out.read_text()) if out.exists() else []
    there = {row["case"] for row in rows}
    for case in CASES:
        if case.script in there or (only and case.script not in only):
            continue
        rows.append(run_one(case, minutes))
        out.write_text(json.dumps(rows, indent=1) + "\n")
        click.echo(json.dumps(rows[-1]))


if __name__ == "__main__":
    main()
