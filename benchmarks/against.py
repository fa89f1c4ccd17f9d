"""`dlprof report` against what it took when the kept figures were measured: `python -m benchmarks.against [--save]`.

The machine may be another one, so each figure is a ratio: to a process that imports pandas and reads the same files
with Python's own json, in turn with it. A case is slower where its least ratio of now lies above the most of then; the
phase is named that has grown most.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.phases import PHASES
from benchmarks.processes import peak_bytes, seconds
from benchmarks.report import TRACE, make

KEPT = Path(__file__).parents[1] / "reports" / "bench.json"
SMALL = TRACE.parents[1] / "dlrm_v100_8ranks" / "worker0_step_12.1694128201545.pt.trace.json.gz"
# Source, ranks, MB each: no less than the source has, which is 9 MB of TRACE.
CASES: Mapping[str, tuple[Path, int, int]] = {
    "one rank of 0.9 MB": (SMALL, 1, 1),
    "eight ranks of 47 MB": (TRACE, 8, 47),
    "one rank of 400 MB": (TRACE, 1, 400),
}
YARDSTICK = """
import json, pathlib, sys
import pandas
for path in pathlib.Path(sys.argv[1]).iterdir():
    len(json.loads(path.read_bytes())["traceEvents"])
"""
Range = tuple[float, float, float]  # median, least and most


@dataclass(frozen=True)
class Figure:
    """What a case takes, in units of the yardstick: the command, and its phases. `memory`: times its files' size."""

    whole: Range
    phases: Mapping[str, float]
    memory: float


def measured(source: Path, ranks: int, megabytes: int, rounds: int) -> Figure:
    """Make the traces of a case, and take both in turn."""
    with tempfile.TemporaryDirectory() as name:
        traces, out = Path(name, "traces"), Path(name, "out")
        traces.mkdir()
        make(source, traces, ranks, megabytes)
        ours = [sys.executable, "-m", "dlprof", "report", str(traces), "--quiet", "-o", str(out)]
        in_phases = [sys.executable, "-m", "benchmarks.phases", str(traces), str(out)]
        theirs = [sys.executable, "-c", YARDSTICK, str(traces)]
        wholes: list[float] = []
        phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for _ in range(rounds + 1):
            unit = seconds(theirs)
            wholes.append(seconds(ours) / unit)
            took = json.loads(subprocess.run(in_phases, check=True, capture_output=True, text=True).stdout)
            for phase in PHASES:
                phases[phase].append(took[phase] / unit)
        size = sum(path.stat().st_size for path in traces.iterdir())
        rest = wholes[1:]  # the first one compiles what was not compiled yet
        whole = (statistics.median(rest), min(rest), max(rest))
        return Figure(whole, {p: statistics.median(of[1:]) for p, of in phases.items()}, peak_bytes(ours) / size)


def said(name: str, now: Figure, then: Figure | None) -> str:
    """Return a case's line."""
    text = f"{name}: {_range(now.whole)} of the yardstick, {now.memory:.2f} of its files in memory"
    if then is None:
        return f"{text}; never measured before"
    change = now.whole[0] / then.whole[0]
    if now.whole[1] <= then.whole[2] and then.whole[1] <= now.whole[2]:
        return f"{text}; as before ({_range(then.whole)})"
    grown = {phase: now.phases[phase] - then.phases[phase] for phase in PHASES}
    pick = max if change > 1 else min
    phase = pick(grown, key=lambda one: grown[one])
    by = f"{phase} took {then.phases[phase]:.3f} and takes {now.phases[phase]:.3f}"
    return f"{text}; {'SLOWER' if change > 1 else 'faster'} than {_range(then.whole)}: {by}"


def _range(of: Sequence[float]) -> str:
    return f"{of[0]:.3f} ({of[1]:.3f} to {of[2]:.3f})"


@click.command()
@click.option("--rounds", default=5)
@click.option("--save", is_flag=True, help="Keep these figures: later ones are compared with them.")
@click.option("--only", multiple=True, type=click.Choice(tuple(CASES)))
def main(rounds: int, save: bool, only: tuple[str, ...]) -> None:
    """Measure the cases, and say which are slower than the committed figures."""
    if not TRACE.exists() or not SMALL.exists():
        click.echo(f"against: left out, needs {TRACE} and {SMALL}")
        return
    known = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    stored = {name: known[name] for name in CASES if name in known}
    for name, (source, ranks, megabytes) in CASES.items():
        if only and name not in only:
            continue
        now = measured(source, ranks, megabytes, rounds)
        kept = stored.get(name)
        then = kept and Figure(tuple(kept["whole"]), kept["phases"], kept["memory"])
        click.echo(said(name, now, then))
        stored[name] = {"whole": now.whole, "phases": now.phases, "memory": now.memory}
    if save:
        KEPT.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main.main(standalone_mode=False)
