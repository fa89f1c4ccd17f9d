"""What the diagnosis is worth: every planted fault recorded in turn with the healthy run of the same workload.

Of each fault: whether its rule found it, what was found beside it, and how near the predicted step without it came to
the measured step of the healthy run. Of each healthy run: what was found that is not there. What the workloads can
plant, and under which options they are healthy too, is read from their files (FAULTS, HEALTHY); what this machine
cannot show is left out with the workload's own word. Writes accuracy.json and a table in README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from dlprof.commands.run import constant

WORKLOADS = Path(__file__).parent.parent / "workloads"
REPORTS = Path(__file__).parent.parent / "reports"

# From here on a finding on a healthy run is one too many: where tools for training grade a loss as notable.
NOTABLE_SHARE = 0.05


@dataclass(frozen=True)
class Planted:
    """One thing to record: a workload and its options, healthy (no `rule`) or with a fault that `rule` must find."""

    workload: str
    name: str
    rule: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Recorded:
    """What one recording said: its mean step, and of every finding its id, share, and the mean step without it.

    The latter is None where the finding speaks of time between the steps.
    """

    workload: str
    name: str
    rule: str
    round: int
    step_ns: float = 0.0
    found: tuple[tuple[str, float, float | None], ...] = ()
    said: str = ""  # of the rule, where it found nothing; of the workload, where it did not run
    device: str = ""
    torch: str = ""
    healthy_ns: float = 0.0  # the mean step of the healthy run in the same round
    together: Mapping[str, float] | None = None


def planted(script: Path) -> list[Planted]:
    """List what to record of a workload: the healthy run first, its healthy variants, then each fault."""
    found = [Planted(script.stem, "healthy", "", ())]
    found += [
        Planted(script.stem, f"healthy, {options}", "", ("--", *shlex.split(options)))
        for options in constant(script, "HEALTHY").values()
    ]
    faults = constant(script, "FAULTS")
    return found + [Planted(script.stem, f, rule, ("--fault", f)) for f, rule in faults.items()]


def record(one: Planted, number: int, folder: Path, before: Sequence[str], more: Sequence[str]) -> Recorded:
    """Record one of them in a folder whose data outlasts it, and give what was diagnosed."""
    options = [*one.options, *(() if "--" in one.options else ("--",)), *more]
    script = WORKLOADS / f"{one.workload}.py"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        run = Path(temporary) / "run"
        command = [*before, sys.executable, "-m", "dlprof", "run", str(script), "--quiet", "-o", str(run), *options]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode or not (run / "result.json").exists():
            lines = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines()
            word = lines[0].split("error:")[-1].strip() if lines else f"exit code {done.returncode}"
            return Recorded(one.workload, one.name, one.rule, number, said=word)
        result = json.loads((run / "result.json").read_text())
    step = result["window"]["step_ns"]
    outcomes = result["outcomes"]
    ours = next((o for o in outcomes if o["id"] == one.rule), None)
    return Recorded(
        workload=one.workload,
        name=one.name,
        rule=one.rule,
        round=number,
        step_ns=step,
        found=tuple(
            (o["id"], o["share"], step - o["saving_ns"] if o["scope"] == "step" else None)
            for o in outcomes
            if o["state"] == "found"
        ),
        said="" if ours is None or ours["state"] == "found" else ours["why"] or ours["summary"],
        device=result["run"]["device"],
        torch=result["run"]["torch"],
        together=result.get("together"),
    )


def tables(records: Sequence[Recorded]) -> str:
    """Write both tables, in Markdown."""
    ran = [r for r in records if r.step_ns]
    if not ran:
        return "Nothing could be recorded.\n"
    lines = [
        "# How good the diagnosis is",
        "",
        f"Written by `make accuracy`: {max(r.round for r in ran) + 1} rounds of short recordings, faulty and healthy in"
        f" turn, on {os.cpu_count()} cores ({ran[0].device}, torch {ran[0].torch}). accuracy.json holds all figures.",
        "",
        "## Planted faults",
        "",
        "Slower: the faulty step ÷ the healthy one of the same round. Predicted: the step that the fault's rule",
        "predicts without it ÷ the measured healthy step; 1.00 is exact. Median, and least to most, of the rounds.",
        "None where the rule speaks of the time between the steps, or of a risk.",
        "",
        "| workload | fault | must be found by | found | share | slower | predicted ÷ healthy | beside it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (workload, name, rule), group in _grouped(r for r in records if r.rule):
        there = [r for r in group if r.step_ns]
        if not there:
            lines.append(f"| {workload} | `{name}` | `{rule}` | not run: {group[0].said} | | | | |")
            continue
        ours = [(r, *f[1:]) for r in there for f in r.found if f[0] == rule]
        first = sum(bool(r.found) and r.found[0][0] == rule for r in there)
        beside = {f[0]: f[1] for r in there for f in r.found if f[0] != rule}
        missed = "; ".join(sorted({r.said for r in there if r.said}))
        lines.append(
            f"| {workload} | `{name}` | `{rule}` | {len(ours)} of {len(there)}, first in {first}"
            + (f" ({missed})" if missed else "")
            + f" | {_spread([share for _, share, _ in ours], '.0%')}"
            + f" | {_spread([r.step_ns / r.healthy_ns for r in there if r.healthy_ns])}"
            + f" | {_spread([without / r.healthy_ns for r, _, without in ours if without and r.healthy_ns])}"
            + f" | {', '.join(f'`{i}` {s:.0%}' for i, s in beside.items())} |"
        )
    lines += [
        "",
        "## Healthy runs",
        "",
        f"Nothing may be found on them with a share of {NOTABLE_SHARE:.0%} or more.",
        "",
        "| workload | run | runs | mean step | found |",
        "|---|---|---|---|---|",
    ]
    for (workload, name, _), group in _grouped(r for r in ran if not r.rule):
        found = [f"`{i}` {share:.1%}" for r in group for i, share, _ in r.found]
        step = median(r.step_ns for r in group) / 1e6
        lines.append(f"| {workload} | {name} | {len(group)} | {step:.1f} ms | {', '.join(found) or 'nothing'} |")
    return "\n".join(lines) + "\n"


def _grouped(records: Iterable[Recorded]) -> list[tuple[tuple[str, str, str], list[Recorded]]]:
    groups: dict[tuple[str, str, str], list[Recorded]] = {}
    for r in records:
        groups.setdefault((r.workload, r.name, r.rule), []).append(r)
    return list(groups.items())


def _spread(values: Sequence[float], form: str = ".2f") -> str:
    if not values:
        return ""
    return f"{median(values):{form}}" + (f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else "")


def main() -> None:
    """Record everything in turn, round after round, and write what came of it so far."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=120, help="of each recording")
    options.add_argument("--workloads", nargs="*", help="only these, by name")
    options.add_argument("--only", nargs="*", help="only these faults, beside the healthy runs")
    options.add_argument("--out", type=Path, default=REPORTS)
    options.add_argument("--before", default="", help="words before each command, as `taskset -c 0-3`")
    args = options.parse_args()
    scripts = [p for p in sorted(WORKLOADS.glob("*.py")) if not args.workloads or p.stem in args.workloads]
    records: list[Recorded] = []
    args.out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(args.rounds):
            for script in scripts:
                healthy = 0.0
                for one in planted(script):
                    if args.only is not None and one.rule and one.name not in args.only:
                        continue
                    more = ("--steps", str(args.steps))
                    said = record(one, number, Path(temporary), shlex.split(args.before), more)
                    healthy = said.step_ns if one.name == "healthy" else healthy
                    records.append(replace(said, healthy_ns=healthy))
                    print(_line(records[-1]), flush=True)
                    (args.out / "accuracy.json").write_text(json.dumps([asdict(r) for r in records], indent=1) + "\n")
                    (args.out / "README.md").write_text(tables(records))
    wrong = [r for r in records if not r.rule and any(share >= NOTABLE_SHARE for _, share, _ in r.found)]
    missed = [r for r in records if r.rule and r.step_ns and all(f[0] != r.rule for f in r.found)]
    print(
        f"{len(records)} recordings; {len(wrong)} healthy with a finding of {NOTABLE_SHARE:.0%}, {len(missed)} missed"
    )


def _line(said: Recorded) -> str:
    found = ", ".join(f"{i} {share:.1%}" for i, share, _ in said.found) or "nothing found"
    return f"{said.workload} {said.name}: {said.step_ns / 1e6:.1f} ms, {found}{f' ({said.said})' if said.said else ''}"


if __name__ == "__main__":
    main()
