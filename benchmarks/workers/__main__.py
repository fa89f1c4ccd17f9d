"""What the step with other numbers of loader workers is predicted to be, against what it is, on this machine.

    python -m benchmarks.workers --out runs/workers                 every kind of job
    python -m benchmarks.workers recommender dense --rounds 3       some

Each kind is recorded with 0, 1, 2, … workers in turn, some rounds of it. Each recording then predicts the step of every
other number, and the mean of that number's recordings is what it is. A prediction is of the right sign if it is on the
measured side of the step as it was, or one of the two is within `--same` of it. Half of the kinds are those that the
replay's constants were chosen with: the table keeps them apart.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workers.job import KINDS, TUNED
from dlprof.analysis.engine import measure
from dlprof.analysis.input.input_waits import AllLoopTimes, forecasts, loop_times
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read.run import open_run


@dataclass(frozen=True)
class Recording:
    """The mean step of one recording, ns, and what it predicts for other numbers of workers; {}: nothing."""

    kind: str
    workers: int
    step_ns: float
    predicted: dict[int, float]


@dataclass(frozen=True)
class Row:
    """A prediction for `to` workers from a recording with `now`, and what was measured; the mean of rounds, ns."""

    kind: str
    now: int
    to: int
    before_ns: float
    predicted_ns: float
    measured_ns: float

    def sign_is_right(self, same: float) -> bool:
        """Return whether predicted and measured are on one side of the step as it was, or one is no change."""
        said, was = (1 - ns / self.before_ns for ns in (self.predicted_ns, self.measured_ns))
        return said * was > 0 or min(abs(said), abs(was)) <= same


def record(kind: str, workers: int, seconds: float, folder: Path) -> None:
    """Record one job."""
    job = ("-m", "benchmarks.workers.job", kind, "--workers", str(workers), "--seconds", str(seconds))
    command = (sys.executable, "-m", "dlprof", "wrap", "--quiet", "--no-report", "-o", str(folder), *job)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read(kind: str, workers: int, folder: Path) -> Recording:
    """Return what a recording predicts; raises DlprofError where it has no steps."""
    known: AllLoopTimes = measure(open_run(folder), [loop_times], jobs=1).frame(loop_times)
    try:
        predicted = {f.workers: f.step_ns for f in forecasts(known, 0)[1:]}
    except NotMeasured:
        predicted = {}
    return Recording(kind, workers, known.step_ns(0), predicted)


def compared(recordings: Sequence[Recording]) -> list[Row]:
    """Return a row for each number of workers that was predicted from another, and was recorded."""
    rows = []
    steps: dict[tuple[str, int], list[float]] = {}
    for r in recordings:
        steps.setdefault((r.kind, r.workers), []).append(r.step_ns)
    means = {key: statistics.mean(found) for key, found in steps.items()}
    for kind, now in means:
        for other, to in means:
            said = [r.predicted[to] for r in recordings if (r.kind, r.workers) == (kind, now) and to in r.predicted]
            if other == kind and to != now and said:
                rows.append(Row(kind, now, to, means[kind, now], statistics.mean(said), means[kind, to]))
    return rows


def table(rows: Sequence[Row], same: float) -> str:
    """Write the rows as a table in Markdown, with how many signs are right and the median error."""
    lines = [
        "| job | workers | step, ms | predicted, ms | measured, ms | error | sign |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        times = " | ".join(f"{ns / 1e6:.1f}" for ns in (r.before_ns, r.predicted_ns, r.measured_ns))
        error, sign = r.predicted_ns / r.measured_ns - 1, "right" if r.sign_is_right(same) else "**wrong**"
        lines.append(f"| {r.kind} | {r.now} → {r.to} | {times} | {error:+.0%} | {sign} |")
    right = sum(r.sign_is_right(same) for r in rows)
    median = statistics.median(abs(r.predicted_ns / r.measured_ns - 1) for r in rows)
    return "\n".join([*lines, "", f"{right} of {len(rows)} signs right; median error {median:.0%}."])


def main(argv: Sequence[str] | None = None) -> None:
    """Record, predict, and print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/workers"), help="where the recordings are kept")
    parser.add_argument("--most", type=int, default=3, help="workers (default: 3)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="that each job trains")
    parser.add_argument("--same", type=float, default=0.02, help="share of a step that is no change")
    args = parser.parse_args(argv)
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    found = []
    for kind in args.kinds or KINDS:
        for n in range(args.rounds):
            for workers in range(args.most + 1):
                folder = args.out / f"{kind}-{workers}-{n}"
                try:
                    if not folder.exists():
                        record(kind, workers, args.seconds, folder)
                    found.append(read(kind, workers, folder))
                except (DlprofError, subprocess.CalledProcessError) as e:
                    print(f"{folder}: {e}", file=sys.stderr)
    for title, tuned in (("chosen with", True), ("only reported", False)):
        if rows := compared([r for r in found if (r.kind in TUNED) == tuned]):
            print(f"\n## Kinds that are {title}\n\n{table(rows, args.same)}")


if __name__ == "__main__":
    main()
