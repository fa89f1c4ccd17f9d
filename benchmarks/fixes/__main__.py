"""What `dlprof fix` is worth, from a script to a patch and its gain: `python -m benchmarks.fixes OUT.json`.

Each script is copied into a repository of its own, where `dlprof fix` runs as a user would start it. Its patch is
applied with `git apply`, and the script then runs with and without it in turn: the gain must lie in the interval that
was printed. A script that has nothing to gain must get no patch. Needs a quiet machine, and five minutes a script. The
scripts are small ones of the usual kinds; with --faults those of workloads/ with each fault that they plant, with
--field public ones that nobody here wrote.
"""

from __future__ import annotations

import ast
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks import field_data
from benchmarks.accuracy import WORKLOADS, planted
from benchmarks.field import scripts
from dlprof.commands.run import constant, count_gpus
from dlprof.result.tried import Of
from dlprof.trial.job import Job
from dlprof.trial.measuring import Steps, log_ratio
from dlprof.trial.running import Runner

SCRIPTS = Path(__file__).with_name("scripts")
CAUSES = Path(__file__).parents[1] / "causes" / "scripts"
PAIRS, STEPS, SECONDS, LIMIT_S = 4, 60, 6.0, 120.0


@dataclass(frozen=True)
class Case:
    """A command to fix, which runs in `cwd` below a copy of `files`.

    `files`: a folder, or files of one. `fix`: options of `dlprof fix`. `env`: variables that the job needs. `data`: its
    name in benchmarks.field_data.
    """

    name: str
    what: str
    command: tuple[str, ...]
    files: tuple[Path, ...]
    cwd: str = "."
    fix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    data: str = ""

    def place(self, folder: Path) -> None:
        """Copy the files into a new repository in `folder`, and make the data, which are no part of it."""
        folder.mkdir()
        for one in self.files:
            if one.is_dir():
                left_out = shutil.ignore_patterns(".git", "__pycache__", "data" if one == WORKLOADS else "")
                there = folder / one.name if one == WORKLOADS else folder
                shutil.copytree(one, there, symlinks=True, ignore=left_out, dirs_exist_ok=True)
            else:
                shutil.copy(one, folder / one.name)
        _git(folder, "init", "-q")
        _git(folder, "add", ".")
        _git(folder, "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-qm", "as it was")
        if self.data:
            subprocess.run([sys.executable, field_data.__file__, self.data, folder / self.cwd], check=True)


def _script(name: str, what: str, *beside: str, arguments: tuple[str, ...] = (), fix: tuple[str, ...] = ()) -> Case:
    folder = SCRIPTS if (SCRIPTS / f"{name}.py").exists() else CAUSES
    files = [folder / f"{name}.py", *(folder / one for one in beside)]
    files += [folder / "clock.py"] if folder == CAUSES else []
    return Case(name, what, (f"{name}.py", *arguments), tuple(files), fix=fix)


SMALL = (
    _script("literal", "no workers, as a literal in the call"),
    _script("option", "no workers, the default of an option of argparse"),
    _script("settings", "no workers, a field of a dataclass"),
    _script("config", "no workers, a key of a YAML file", "config.yaml", arguments=("config.yaml",)),
    _script("optimizer", "an optimizer that updates each parameter by itself"),
    _script("threads", "one thread on two cores"),
    _script("images", "convolutions in NCHW", fix=("--allow-numerics",)),
    _script("workers_in_memory", "two workers for samples that are in memory"),
    _script("small_tensors", "workers that send many small tensors"),
    _script("cache_lost", "workers that start anew each epoch and lose their cache"),
    _script("average", "an average of the weights, kept parameter by parameter"),
    _script("collected", "the garbage collector, called in every step"),
    _script("rows", "a tensor of a list of arrays in every sample"),
    _script("healthy_table", "nothing is wrong"),
    _script("healthy_images", "nothing is wrong"),
)


# Of benchmarks/causes: those whose mistake an edit of code cures.
CURED = """
animal_tracks book_ratings collected_each_step dataframe_rows denormals ema graded_validation
kitchen_clips lander_dqn list_to_tensor next_item pairs_expanded pedestrians session_gru slices
station_demand tensor_rows triplet_search whole_column zip_open
"""


def cured() -> list[Case]:
    """Return the scripts of benchmarks/causes whose mistake an edit of code cures."""
    said = {name: ast.get_docstring(ast.parse((CAUSES / f"{name}.py").read_text())) or "" for name in CURED.split()}
    return [
        _script(name, text.partition(". ")[0][0].lower() + text.partition(". ")[0][1:]) for name, text in said.items()
    ]


def faults() -> list[Case]:
    """Return the faults that the reference workloads plant; of several ranks those that need them."""
    cases = []
    for script in sorted(WORKLOADS.glob("*.py")):
        of_one = not any(word in script.stem for word in ("fsdp", "tensor_parallel", "pipeline", "moe", "dlrm"))
        for one in planted(script)[1]:
            alone = of_one and one.fault not in (constant(script, "NEEDS_TWO_RANKS") or ())
            gpus = 2 if one.rule == "data_parallel" else one.fault in (constant(script, "NEEDS_GPU") or ())
            if count_gpus() < gpus:
                continue
            words = (f"workloads/{script.name}", "--fault", one.fault, *one.options)
            launcher = () if alone else ("--", "torchrun", "--nproc-per-node", "2")
            cases.append(Case(f"{script.stem}: {one.fault}", one.rule, (*launcher, *words), (WORKLOADS,)))
    return cases


def public(checkouts: Path) -> list[Case]:
    """Return the public scripts of benchmarks/field.toml whose checkouts are in a folder."""
    cases = []
    for one in scripts():
        root, _, below = one.folder.partition("/")
        if not (checkouts / root).is_dir():
            continue
        # The launcher finds the modules of the checkout from where it starts.
        path = {"PYTHONPATH": os.path.relpath(".", below or ".")} if one.path else {}
        env = {"HF_HUB_OFFLINE": "1", **one.env, **path}
        cases.append(
            Case(one.name, one.kind, tuple(one.command), (checkouts / root,), below or ".", env=env, data=one.data)
        )
    return cases


def run_one(case: Case, minutes: float) -> dict[str, Any]:
    """Return what became of a case."""
    with tempfile.TemporaryDirectory() as name:
        plain, patched = Path(name, "plain"), Path(name, "patched")
        case.place(plain)
        cwd = plain / case.cwd
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **case.env}
        words = [sys.executable, "-m", "dlprof.cli", "fix", "--minutes", f"{minutes:g}", "--format", "json", "--quiet"]
        words += [*case.fix, "-o", str(Path(name, "run")), *case.command]
        began = time.monotonic()
        done = subprocess.run(
            words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        row: dict[str, Any] = {"case": case.name, "what": case.what, "minutes": (time.monotonic() - began) / 60}
        if done.returncode:
            return row | {"error": done.stderr.strip().splitlines()[-3:] or done.returncode}
        said = json.loads(done.stdout)
        best = said["best"]
        row |= {
            "state": said["state"],
            "why": said["why"],
            "runs": said["runs"],
            "words": said["fix"]["words"],
            "by_hand": said["fix"]["by_hand"][:1],
            "lines": said["fix"]["lines"],
            "tried": [
                {k: a[k] for k in ("settings", "verdict", "predicted", "measured", "losses", "why")}
                for a in said["attempts"]
            ],
        }
        row["kept"] = best and best["settings"]
        if best is None:
            return row
        row |= {"printed": best["measured"], "losses": best["losses"], "of": best["of"]}
        if said["fix"]["patch"] is None:
            return row
        row["untouched"] = not _git(plain, "status", "--porcelain", "--untracked-files=no")
        shutil.copytree(plain, patched, symlinks=True)
        applied = subprocess.run(
            ["git", "apply", f"--directory={case.cwd}" if case.cwd != "." else "--", said["fix"]["patch"]],
            cwd=patched,
            capture_output=True,
            text=True,
            check=False,
        )
        row["applies"] = applied.returncode == 0
        row["patch"] = Path(said["fix"]["patch"]).read_text().splitlines()
        if not row["applies"]:
            return row | {"error": applied.stderr.splitlines()[:3]}
        of: Of = "start" if best["of"] == "start" else "step"
        return row | _measured(case, env, plain, patched, Path(name), of)


def _measured(case: Case, env: Mapping[str, str], plain: Path, patched: Path, folder: Path, of: Of) -> dict[str, Any]:
    """Return the gain of the patched script, from pairs of runs of both in turn."""
    ratios = []
    for pair in range(PAIRS):
        try:
            before, after = (
                _run(case, env, tree / case.cwd, folder / f"{pair}-{tree.name}") for tree in (plain, patched)
            )
        except click.ClickException as e:
            return {"error": [e.message]}
        ratios.append(log_ratio(before, after, of))
    error = statistics.stdev(ratios) / math.sqrt(PAIRS)
    return {"measured": math.exp(statistics.mean(ratios)), "measured_error": error}


def _run(case: Case, env: Mapping[str, str], cwd: Path, folder: Path) -> Steps:
    folder.mkdir()
    words = case.command[1:] if case.command[0] == "--" else (sys.executable, *case.command)
    done = Runner(Job(words, cwd, env, {}), folder, STEPS, lambda: False, SECONDS)({}, LIMIT_S)
    if not isinstance(done, Steps):
        raise click.ClickException(f"{case.name}: {done.why}")
    return done


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


# Between these lines docs/prove.md has the table of reports/fixes.json.
PAGE = Path(__file__).parents[2] / "docs" / "prove.md"
_BEGIN, _END = "<!-- made by benchmarks.fixes -->\n", "<!-- until here -->\n"
_LOSSES = {"equal": "the same bits", "within": "within chance", "differ": "differ", "": ""}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return what became of each case as a table, and below it what that is worth."""
    rows = list(rows)
    lines = [
        "| script | kept | printed | with the patch, measured | losses | minutes |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    patched = [row for row in rows if "applies" in row]
    measured = [row for row in patched if "measured" in row]
    within = [r for r in measured if (r["printed"]["low"] or 0) <= r["measured"] <= (r["printed"]["high"] or math.inf)]
    near = [
        r
        for r in measured
        if _range(r)[0] <= (r["printed"]["high"] or math.inf) and r["printed"]["low"] <= _range(r)[1]
    ]
    slower = [row["case"] for row in measured if _range(row)[1] < 1]
    said = (
        f"{len(rows)} scripts: {len(patched)} patches, of which {sum(r['applies'] for r in patched)} apply and"
        f" {len(slower) or 'none'} made the job slower. The gain of the patched script lies in the interval that was"
        f" printed in {len(within)} of {len(measured)}; the two intervals overlap in {len(near)}."
        f" {sum(row.get('losses') == 'equal' for row in patched)} patches leave the losses the same to the bit,"
        f" {sum(row.get('losses') == 'within' for row in patched)} as near as two plain runs are."
    )
    return "\n".join(lines) + f"\n\n{textwrap.fill(said, 120)}\n"


def _range(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the interval of a patched script's gain: twice the standard error of its pairs."""
    factor = math.exp(2 * row["measured_error"])
    return row["measured"] / factor, row["measured"] * factor


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = f"`{row['case']}`: {row['what']}"
    minutes = f"{row['minutes']:.1f}"
    if "state" not in row:
        return name, f"failed: {' '.join(map(str, row['error']))}", "", "", "", minutes
    if not row["kept"]:
        verdicts = Counter(a["verdict"].replace("_", " ") for a in row.get("tried", ()))
        tried = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items())
        by_hand = "; an edit by hand is named" if row.get("by_hand") else ""
        return name, f"nothing{f' ({tried})' if tried else ''}{by_hand}", "", "", "", minutes
    kept = ", ".join(f"`{name}={value}`" for name, value in row["kept"].items())
    gain, start = row["printed"], " of the start" if row.get("of") == "start" else ""
    printed = f"{gain['ratio']:.2f} ×{start}" + (f" ({gain['low']:.2f} to {gain['high']:.2f})" if gain["low"] else "")
    if "measured" in row:
        low, high = _range(row)
        measured = f"{row['measured']:.2f} ×{start} ({low:.2f} to {high:.2f})"
    elif "applies" in row:
        measured = "not measured" if row["applies"] else "does not apply"
    else:
        measured = "no patch: said in words"
    return name, kept, printed, measured, _LOSSES.get(row["losses"], row["losses"]), minutes


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--page", is_flag=True, help="Run nothing: write the table of OUT into docs/prove.md.")
@click.option("--minutes", default=5.0, help="As for `dlprof fix`.")
@click.option("--only", multiple=True, help="Only this case. Repeatable.")
@click.option("--faults", "planted_ones", is_flag=True, help="The faults that the reference workloads plant instead.")
@click.option("--causes", is_flag=True, help="Those of benchmarks/causes that an edit of code cures instead.")
@click.option(
    "--field",
    "checkouts",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The public scripts of benchmarks/field.toml instead, whose checkouts are in this folder.",
)
@click.option("--hours", type=float, help="Start nothing after so long.")
def main(
    out: Path,
    page: bool,
    minutes: float,
    only: tuple[str, ...],
    planted_ones: bool,
    causes: bool,
    checkouts: Path | None,
    hours: float | None,
) -> None:
    """Run the cases, and write what became of them to OUT; those that are there already are not run again."""
    rows = json.loads(out.read_text()) if out.exists() else []
    if page:
        before, _, rest = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(f"{before}{_BEGIN}{table(rows)}{_END}{rest.partition(_END)[2]}")
        return
    there = {row["case"] for row in rows}
    ends = time.monotonic() + 3600 * hours if hours else math.inf
    cases: Iterable[Case] = public(checkouts.absolute()) if checkouts else SMALL
    cases = faults() if planted_ones else cured() if causes else cases
    for case in cases:
        if case.name in there or (only and case.name not in only) or time.monotonic() > ends:
            continue
        rows.append(run_one(case, minutes))
        out.write_text(json.dumps(rows, indent=1) + "\n")
        click.echo(json.dumps(rows[-1]))


if __name__ == "__main__":
    main()
