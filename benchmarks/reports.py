"""The folder reports/: result.json and report.html of every workload, healthy and with its most telling fault.

The pages share one copy of plotly.js, so that all of them together are small enough to keep with the code. What other
machines have made stays; of this one, what is made anew replaces what was there. With --kept nothing is recorded: the
reports are those of the newest runs that `benchmarks.accuracy --keep` has left there, diagnosed anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

from msgspec.structs import replace

from benchmarks import summary
from benchmarks.accuracy import ROW, WORKLOADS, Planted, machine, planted, reason, run
from benchmarks.summary import REPORTS, Reported
from dlprof.report import formatting, html, verdict
from dlprof.result import Result
from dlprof.result.stored import from_json, to_json

ROOT = WORKLOADS.parent
PLOTLY = "plotly-basic.min.js"

# The faults whose reports show most, the best first; the first that this machine can show is recorded.
TELLING = {
    "amp_transformer": ("full_precision", "loop_optimizer"),
    "bert_pretrain": ("boolean_mask", "sync_every_batch"),
    "ddp_resnet": ("slow_loader_one_rank", "no_workers"),
    "dlrm_like": ("table_by_table", "uneven_tables"),
    "fsdp_gpt": ("long_sequences",),
    "loader_variants": ("slow_worker",),
    "pipeline_transformer": ("uneven_split",),
}


def record(one: Planted, steps: int) -> Result | str:
    """Record one of them and give what was diagnosed, without this machine's paths; a failure's own word else."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / f"{one.workload}-{one.fault or 'healthy'}"
        fault = ["--fault", one.fault] if one.fault else []
        command = [sys.executable, "-m", "dlprof", "run", one.workload, "--quiet", "-o", str(out), *fault]
        code, said = run([*command, "--", "--steps", str(steps), *one.options], ROOT)
        if code or not (out / "result.json").exists():
            return reason(said, code)
        return diagnosed(out)


def again(one: Planted, kept: Path) -> Result | str:
    """Return what is diagnosed now of the newest run of it that is kept; that there is none else."""
    runs = [row.parent for row in kept.absolute().glob(f"*/{ROW}") if json.loads(row.read_text())["name"] == one.name]
    mine = [folder for folder in runs if folder.name.startswith(f"{one.workload}-")]
    if not mine:
        return "not among the recordings"
    newest = max(mine, key=lambda folder: folder.name.rpartition("-")[2])
    code, said = run([sys.executable, "-m", "dlprof", "report", str(newest), "--quiet"], kept)
    return reason(said, code) if code else diagnosed(newest)


def diagnosed(out: Path) -> Result:
    """Read what was diagnosed of a run, without the paths and the name of the machine that recorded it."""
    text, recorded = (out / "result.json").read_text(), json.loads((out / "run.json").read_text())
    script = next((Path(word) for word in recorded["command"] if word.endswith(".py")), ROOT / "workloads" / "x.py")
    # /somewhere/.venv/bin/python: of /usr/bin/python there is nothing to take away.
    programs = [Path(word) for word in recorded["command"] if word.startswith("/")]
    environments = [p.parents[2] for p in programs if p.parent.name == "bin" and len(p.parts) > 4]
    for folder in (out, out.parent, recorded["cwd"], script.parent.parent, ROOT, *environments, Path.home()):
        text = text.replace(f"{folder}/", "")
    for host in recorded["hosts"]:
        text = re.sub(rf"\b{re.escape(host)}\b", "host", text)
    return from_json(json.loads(text))


def sharing(page: str, plotly: str) -> str:
    """Return report's page with plotly.js taken out of it: it is loaded from `plotly`, a path relative to the page."""
    whole = (files("dlprof.report") / "page" / PLOTLY).read_text(encoding="utf-8")
    before, script, after = page.partition(f"<script>{whole}</script>")
    head, policy, rest = before.partition("script-src ")
    if not script or not policy:
        raise ValueError("a page that holds plotly.js otherwise than it used to")
    # What stands beside a page that was opened from a disk has no origin that 'self' could name.
    return f'{head}{policy}&#39;self&#39; file: {rest}<script src="{plotly}"></script>{after}'


def keep(one: Planted, result: Result, here: str, out: Path) -> Reported:
    """Write one report into its folder, and give its line in the index."""
    folder = Path(re.sub(r"[^a-z0-9]+", "-", here.lower()).strip("-")) / f"{one.workload}-{one.fault or 'healthy'}"
    (out / folder).mkdir(parents=True, exist_ok=True)
    named = replace(result, run=replace(result.run, path=folder.name))
    (out / folder / "result.json").write_text(json.dumps(to_json(named), allow_nan=False, separators=(",", ":")) + "\n")
    (out / folder / "report.html").write_text(sharing(html.render(named), f"../../{PLOTLY}"))
    diagnosis, gain, _ = verdict.headline(named)
    return Reported(
        *(one.workload, one.name, one.rule, here, _today(), folder.as_posix()),
        headline=f"{diagnosis} {gain}",
        steps=formatting.steps(named),
    )


def made_of(choices: Sequence[Planted], make: Callable[[Planted], Result | str], here: str, out: Path) -> Reported:
    """Make and keep the first of these that this machine can show; of none, tell why the first cannot be."""
    why = ""
    for one in choices:
        result = make(one)
        if isinstance(result, Result):
            made = keep(one, result, here, out)
            print(f"{one.workload} {one.name}: {made.headline}", flush=True)
            return made
        print(f"{one.workload} {one.name}: {result}", flush=True)
        why = why or result
    one = choices[0]
    return Reported(*(one.workload, one.name, one.rule, here, _today(), ""), headline=f"not run: {why}", steps="")


def _today() -> str:
    return datetime.date.today().isoformat()


def main() -> None:
    """Record and keep two reports of each workload, and write the index."""
    options = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.reports")
    options.add_argument("--workloads", nargs="*", help="only these, by name")
    options.add_argument("--steps", type=int, default=120, help="of each recording (default: 120)")
    options.add_argument("--kept", type=Path, metavar="DIR", help="record nothing: use the runs that are kept in DIR")
    options.add_argument("--out", type=Path, default=REPORTS, help="default: reports")
    args = options.parse_args()
    here = machine()
    make = partial(again, kept=args.kept) if args.kept else partial(record, steps=args.steps)
    args.out.mkdir(exist_ok=True)
    for name in (PLOTLY, "plotly-basic.LICENSE"):
        (args.out / name).write_bytes((files("dlprof.report") / "page" / name).read_bytes())
    for script in sorted(WORKLOADS.glob("*.py")):
        if args.workloads and script.stem not in args.workloads:
            continue
        (healthy, *_), faults = planted(script)
        first = TELLING.get(script.stem, ())
        faults.sort(key=lambda f: first.index(f.name) if f.name in first else len(first))
        made = [made_of([healthy], make, here, args.out)]
        if args.kept and not made[0].folder:
            continue  # what is not kept may well be possible here
        if made[0].folder:  # else a fault cannot be shown either
            made.append(made_of(faults, make, here, args.out))
        made = [r for r in made if r.folder or not args.kept]
        before = summary.reported(args.out)
        old = [r for r in before if (r.workload, r.machine) == (script.stem, here)]
        if not made[0].folder and any(r.folder for r in old):
            continue  # made while its library was there
        for folder in {r.folder for r in old if r.folder} - {r.folder for r in made}:
            shutil.rmtree(args.out / folder, ignore_errors=True)
        kept = [r for r in before if r not in old]
        summary.write(args.out, made=sorted([*kept, *made], key=lambda r: (r.workload, r.machine)))


if __name__ == "__main__":
    main()
