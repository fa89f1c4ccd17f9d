"""What `dlprof try` is worth: planted faults that a setting removes, and healthy jobs: `python -m benchmarks.trials`.

Each job is recorded, and then `dlprof try` runs on it as a user would start it. Of a fault: whether the best change
that it ends with is the one that removes the fault, and how near its gain comes to that of removing it by hand, the
two jobs run in turn. Of a healthy job, which is also asked to try a setting that does nothing for it: whether it ends
with nothing to gain.

Writes --out/trials.json after every job and goes on where it was stopped; needs a quiet machine and about an hour.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from benchmarks.accuracy import WORKLOADS, machine
from dlprof.commands.report import analyse
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from dlprof.result import tried
from dlprof.result.tried import Of
from dlprof.trial.job import repeatable
from dlprof.trial.measuring import Steps, log_ratio
from dlprof.trial.running import Runner

REPORTS = Path(__file__).parents[1] / "reports"
FILE = "trials.json"

# Of a healthy job, the change that is asked for: nothing allocates much in their loops.
NOTHING = "gc.freeze=True"

# A recording lasts about so long, and so many steps at least. By hand: pairs of runs, each of so many seconds of steps.
SECONDS, LEAST_STEPS = 25.0, 60
PAIRS, WINDOW_S, RUN_S = 3, 8.0, 90.0


@dataclass(frozen=True)
class Case:
    """A job: a workload and its options, with a fault and the `settings` that may remove it, or healthy.

    `by_hand`: the options instead of the fault's, where these are not those of the plain job. `step_ms`: about how long
    its step is.
    """

    workload: str
    step_ms: float
    fault: str = ""
    settings: tuple[str, ...] = ()
    options: str = ""
    by_hand: str = ""
    procs: int = 1

    @property
    def name(self) -> str:
        """Tells it from the others: "ddp_resnet no_workers"."""
        return " ".join(filter(None, (self.workload, self.fault or "healthy", self.options)))


_OPTIMIZER = ("optimizer.fused", "optimizer.foreach")
_LONG, _CHEAP = "--epochs 40", "--storage mapped --workers 0 --read-ms 0"
FAULTS = (
    Case("amp_transformer", 65, "loop_optimizer", _OPTIMIZER, "--width 256 --length 32 --batch-size 4"),
    Case("ddp_resnet", 320, "no_workers", ("loader.num_workers",)),
    Case("ddp_resnet", 470, "many_threads", ("torch.num_threads",)),
    # By hand the buckets are those that `try` ends with: on a CPU the workload's own are smaller.
    Case(
        "ddp_resnet",
        110,
        "tiny_buckets",
        ("ddp.bucket_cap_mb",),
        "--batch-size 16",
        "--batch-size 16 --bucket-mb 25",
        procs=2,
    ),
    Case("fsdp_gpt", 115, "loop_optimizer", _OPTIMIZER, "--batch-size 32"),
    Case(
        "loader_variants", 3, "needless_workers", ("loader.num_workers",), _LONG, f"{_CHEAP} --layers 4 --batch-size 8"
    ),
    Case("loader_variants", 85, "no_workers", ("loader.num_workers",), _LONG, "--read-ms 0.5"),
    Case("loader_variants", 100, "one_thread", ("torch.num_threads",), f"{_LONG} {_CHEAP} --batch-size 512"),
    Case("loader_variants", 42, "workers_restart", ("loader.persistent_workers",), _LONG, "--records 256 --epochs 320"),
    Case("tensor_parallel_gpt", 1000, "loop_optimizer", _OPTIMIZER),
)
HEALTHY = (
    Case("amp_transformer", 135),
    Case("bert_pretrain", 72),
    Case("ddp_resnet", 245),
    Case("ddp_resnet", 245, options="--workers 2"),
    Case("dlrm_like", 190),
    Case("fsdp_gpt", 450),
    Case("loader_variants", 47, options=_LONG),
    Case("loader_variants", 41, options=f"{_LONG} --storage mapped"),
    Case("pipeline_transformer", 220),
    Case("tensor_parallel_gpt", 700),
)


class Row(msgspec.Struct, frozen=True):
    """What came of one case; a ratio is how many times faster."""

    name: str
    machine: str
    fault: bool
    state: str = ""
    best: str = ""  # the settings that it ends with; "": nothing to gain
    right: bool = False
    tried: str = ""  # each change, and what came of it
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    by_hand: float | None = None
    by_hand_error: float | None = None  # its standard error, of the logarithm
    why: str = ""

    @property
    def off(self) -> float | None:
        """By how much the gain is off that of removing the fault by hand."""
        return None if self.ratio is None or self.by_hand is None else self.ratio / self.by_hand - 1


def run(case: Case, folder: Path, minutes: float) -> Row:
    """Record a job in a folder, try what its report names, and measure by hand what removing its fault gains."""
    out = folder / "run"
    steps = max(LEAST_STEPS, int(SECONDS * 1e3 / case.step_ms))
    words = ["run", str(WORKLOADS / f"{case.workload}.py"), "--quiet", "-o", str(out)]
    words += ["--procs", str(case.procs)] if case.procs > 1 else []
    words += ["--fault", case.fault] if case.fault else []
    code, said = _dlprof([*words, "--", "--steps", str(steps), *case.options.split()], folder)
    made = Row(case.name, machine(), bool(case.fault))
    if code:
        return msgspec.structs.replace(made, why=said)
    asked = [] if case.fault else ["--set", NOTHING]
    code, said = _dlprof(["try", str(out), "--quiet", f"--minutes={minutes}", *asked], folder)
    if not (out / tried.FILE).is_file():
        return msgspec.structs.replace(made, why=said)
    found = tried.from_json(msgspec.json.decode((out / tried.FILE).read_bytes()))
    attempts = "; ".join(_attempt(a) for a in (*found.attempts, *found.combinations))
    made = msgspec.structs.replace(made, state=found.state, why=found.why, tried=attempts)
    best = found.best
    if best is not None:
        gain = best.measured
        made = msgspec.structs.replace(
            made,
            best=best.words,
            ratio=gain.ratio if gain else None,
            low=gain.low if gain else None,
            high=gain.high if gain else None,
        )
    if not case.fault:
        return msgspec.structs.replace(made, right=best is None)
    right = best is not None and any(name in best.settings for name in case.settings)
    logs = by_hand(case, out, folder, best.of if best else "step")
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None
    hand = math.exp(statistics.mean(logs)) if logs else None
    return msgspec.structs.replace(made, right=right, by_hand=hand, by_hand_error=error)


def _attempt(a: tried.Attempt) -> str:
    gain = a.measured
    ratio = (
        f" {gain.ratio:.3f} ({gain.low or math.nan:.3f} to {gain.high or math.nan:.3f}, {gain.pairs})" if gain else ""
    )
    return f"{a.words}: {a.verdict}{ratio}{f' ({a.why})' if a.why else ''}"


def by_hand(case: Case, out: Path, folder: Path, of: Of) -> list[float]:
    """Return, of each pair of runs, the logarithm of how many times faster the job is without its fault."""
    recorded = open_run(out)
    faulty = repeatable(recorded, os.environ)
    words = list(faulty.command)
    at = words.index("--fault")
    healthy = repeatable(recorded, os.environ, [*words[:at], *words[at + 2 :], *case.by_hand.split()])
    window = analyse(out).window
    steps = max(LEAST_STEPS // 4, int(WINDOW_S * 1e9 / window.step_ns)) if window else LEAST_STEPS
    runs = folder / "by-hand"
    logs: list[float] = []
    before: Steps | None = None
    for number in range(2 * PAIRS + 1):
        place = runs / f"{number}"
        place.mkdir(parents=True)
        found = Runner(healthy if number % 2 else faulty, place, steps, lambda: False)({}, RUN_S)
        if not isinstance(found, Steps):
            print(f"{case.name}, by hand: {found.why}", flush=True)
            before = None
            continue
        if before is not None:
            try:
                logs.append(log_ratio(before, found, of) if number % 2 else log_ratio(found, before, of))
            except NotMeasured as e:
                print(f"{case.name}, by hand: {e}", flush=True)
        before = found
    return logs


def _dlprof(words: Sequence[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "dlprof", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return done.returncode, lines[-1] if lines else ""


def line(row: Row) -> str:
    """Return what is printed of a row."""
    what = (
        f"{row.best} {row.ratio:.2f} × ({row.low or math.nan:.2f} to {row.high or math.nan:.2f})" if row.ratio else ""
    )
    hand = f", by hand {row.by_hand:.2f} × ± {row.by_hand_error or math.nan:.2f}" if row.by_hand else ""
    right = "right" if row.right else "WRONG"
    return f"{right}  {row.name}: {what or 'nothing to gain'}{hand} {row.state} {row.why} [{row.tried}]"


@click.command()
@click.option("--only", multiple=True, help="The names of cases.")
@click.option("--minutes", default=6.0, show_default=True, help="How long changes of each are tried at most.")
@click.option("--out", type=click.Path(path_type=Path), default=REPORTS, show_default="reports")
@click.option("--again", is_flag=True, help="Run also what --out already holds.")
def main(only: tuple[str, ...], minutes: float, out: Path, again: bool) -> None:
    """Run each case in turn, and print how many were right."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / FILE
    rows = msgspec.json.decode(file.read_bytes(), type=list[Row]) if file.is_file() else []
    here = machine()
    # A fault, a healthy job, a fault, …: whatever stops it, some of both are done.
    for case in (c for pair in zip(FAULTS, HEALTHY, strict=True) for c in pair):
        known = any((r.name, r.machine) == (case.name, here) for r in rows)
        if (only and case.name not in only) or (known and not again):
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            row = run(case, Path(temporary), minutes)
        print(f"{line(row)} [{time.monotonic() - begun:.0f} s]", flush=True)
        rows = [*(r for r in rows if (r.name, r.machine) != (row.name, here)), row]
        file.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    for fault, of in ((True, "faults removed by the right setting"), (False, "healthy jobs with nothing to gain")):
        chosen = [r for r in rows if r.fault == fault and r.machine == here]
        print(f"{sum(r.right for r in chosen)} of {len(chosen)} {of}")
    offs = sorted(abs(r.off) for r in rows if r.off is not None)
    if offs:
        print(f"the gain is off that by hand by {statistics.median(offs):.1%} in the median, {offs[-1]:.1%} at most")


if __name__ == "__main__":
    main()
