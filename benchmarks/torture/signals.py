"""What a signal's handler raises, while dlprof records: is any of it lost, and what do the tracebacks show?

    python -m benchmarks.torture.signals                    10,000 signals, plain and recorded
    python -m benchmarks.torture.signals --count 500 --seed 7

A loop of short steps (scripts/signals_job.py) gets SIGALRM at random moments. Its handler raises, and the loop catches
and counts. The signals are shared out over kinds of handlers, of exceptions and of loops. Exits with 1 where the
recorded job has lost more than the plain one, has a frame of dlprof in a traceback, or has fewer steps in its recording
than have ended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlprof.run_folder import lines_of

# Handlers, what they raise, and the loop: what marks the steps, or what makes its objects anew.
CASES = (
    ("function", "StopError", "loader"),
    ("function", "TimeoutError", "optimizer"),
    ("method", "AttributeError", "loader"),
    ("object", "KeyError", "optimizer"),
    ("partial", "RuntimeError", "loader"),
    ("once", "StopError", "optimizer"),
    ("function", "KeyboardInterrupt", "loader"),
    ("function", "RuntimeError", "made"),
)
# Of the loop that makes its objects anew.
_SETTINGS = (
    *("--allow-numerics", "--set", "loader.pin_memory=False", "--set", "optimizer.foreach=True"),
    *("--set", "copy.non_blocking=True", "--set", "torch.autocast=bf16", "--set", "model.memory_format=channels_last"),
)


@dataclass(frozen=True)
class Result:
    """What became of the signals of one job, plain or recorded."""

    raised: int
    lost: int
    ended: int
    ours: dict[str, int]  # frames of dlprof in tracebacks
    steps: int  # in the recording; of a plain job, as many as have ended
    said: str  # by dlprof on stderr


def run(case: tuple[str, str, str], count: int, seed: int, folder: Path | None, options: Sequence[str] = ()) -> Result:
    """Run a job of a case, recorded into a folder unless that is None; raises CalledProcessError where it fails."""
    names = zip(("--handler", "--error", "--loop"), case, strict=True)
    # In a folder of its own: this one has a secrets.py, which Python would take for its own.
    job = [sys.executable, str(Path(__file__).with_name("scripts") / "signals_job.py"), *itertools.chain(*names)]
    job += ["--count", str(count), "--seed", str(seed)]
    options = (*options, *(_SETTINGS if case[2] == "made" else ()))
    wrap = [sys.executable, "-m", "dlprof", "wrap", "--quiet", "--no-report", "-o", str(folder), *options]
    done = subprocess.run(job if folder is None else [*wrap, *job], check=True, capture_output=True, text=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    steps = told["ended"]
    if folder is not None:
        rows = map(json.loads, lines_of(folder / "ranks/00000", "steps"))
        steps = sum(row["optimizer_steps"] for row in rows)
    ours = {frame: n for frame, n in told["frames"].items() if "/dlprof/" in frame}
    return Result(told["raised"], told["lost"], told["ended"], ours, steps, done.stderr)


def results(count: int, seed: int) -> Iterator[tuple[tuple[str, str, str], Result, Result]]:
    """Yield each case with what became of its share of the signals, plain and recorded."""
    with tempfile.TemporaryDirectory() as folder:
        for n, case in enumerate(CASES):
            share = count // len(CASES) + (n < count % len(CASES))
            yield case, run(case, share, seed + n, None), run(case, share, seed + n, Path(folder) / str(n))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases and print a line for each; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="signals, of all cases together (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    failed = False
    for case, plain, ours in results(args.count, args.seed):
        wrong = ours.lost > plain.lost or bool(ours.ours) or ours.steps < ours.ended
        failed |= wrong
        print(
            f"{' '.join(case):35} {ours.raised} signals, lost: plain {plain.lost}, recorded {ours.lost};"
            f" {ours.ended} steps, recorded {ours.steps}; frames of dlprof {ours.ours or 0}{' FAILED' * wrong}",
            flush=True,
        )
        if wrong:
            print(ours.said, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
