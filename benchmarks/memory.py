"""How near what dlprof counts of a step's memory comes to what the allocator says, for reference workloads on the CPU.

    python -m benchmarks.memory [--only WORKLOAD]...

Each workload is recorded, and then run again without dlprof for as many steps (benchmarks/allocated.py), which measures
the same step by the allocator alone. Prints a row a workload, in Markdown: for each part what was counted on rank 0,
and by how much that is off. Then what the counting cost in the one step that it takes. Exits with 1 where parameters,
gradients or state are off by more than 5 %, or what the forward pass leaves by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

# Workload → its options, on how many ranks, and which other part its forward pass leaves: the parameters that FSDP has
# gathered, the ids that are exchanged and then looked up.
JOBS: Mapping[str, tuple[tuple[str, ...], int, str]] = {
    "amp_transformer": (("--precision", "bf16"), 1, ""),
    "ddp_resnet": ((), 2, ""),
    "fsdp_gpt": ((), 2, "communication"),
    "bert_pretrain": ((), 1, ""),
    "dlrm_like": ((), 2, "input"),
    "tensor_parallel_gpt": ((), 2, ""),
}

# The farthest off, by part.
GOALS = {"parameter": 0.05, "gradient": 0.05, "optimizer": 0.05, "activation": 0.10}

# What any forward pass leaves.
_LEFT = ("activation", "cast")


@dataclass(frozen=True)
class Compared:
    """One workload: bytes by part, as counted and as measured, and the ns that counting took."""

    workload: str
    counted: Mapping[str, int]
    measured: Mapping[str, int]
    cost_ns: int

    def off(self, part: str) -> float:
        """Return by what share of the measured bytes the counted ones are off."""
        return (self.counted[part] - self.measured[part]) / max(self.measured[part], 1)

    @property
    def misses(self) -> list[str]:
        """The parts that are farther off than they should be."""
        return [part for part, goal in GOALS.items() if self.measured[part] > 0 and abs(self.off(part)) > goal]


def counted(held: Mapping[str, Any], also: str = "") -> dict[str, int]:
    """Return the bytes of held.json by part, with all that the forward pass leaves as `activation`."""
    sizes = dict.fromkeys(GOALS, 0)
    for row in held["rows"]:
        part = "activation" if row["part"] in (*_LEFT, also) else row["part"]
        if part in sizes:
            sizes[part] += row["bytes"]
    return sizes


def compare(workload: str, folder: Path) -> Compared:
    """Record a workload, and measure the step that was counted."""
    options, ranks, also = JOBS[workload]
    script = ROOT / "workloads" / f"{workload}.py"
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    start = launched if ranks > 1 else [sys.executable]
    run = folder / "run"
    wrap = [sys.executable, "-m", "dlprof", "wrap", "-o", str(run), "--no-report", "--no-sample", "--no-trace", "--"]
    _done([*wrap, *start, str(script), *options, "--steps", "24"])
    held = json.loads((run / "ranks/00000/held.json").read_text())
    step = _position(run, held["step"])
    _done([*start, "-m", "benchmarks.allocated", str(folder), str(step), str(script), *options, "--steps", "24"])
    measured = json.loads((folder / "0.json").read_text())
    return Compared(workload, counted(held, also), measured, held["cost_ns"])


def _position(run: Path, step: int) -> int:
    """Return how many optimizer steps came before a step."""
    lines = (run / "ranks/00000/steps.jsonl").read_text().splitlines()
    rows = (json.loads(line) for line in lines)
    return sum(row["optimizer_steps"] for row in rows if row["step"] < step)


def _done(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")


def head() -> str:
    """Return the first lines of the comparison in Markdown."""
    return f"| workload | {' | '.join(GOALS)} | counting |\n{'|---' * (len(GOALS) + 2)}|"


def line(one: Compared) -> str:
    """Return a workload's line: MB that were counted, and by how much they are off."""
    cells = [f"{one.counted[part] / 1e6:,.2f} ({one.off(part):+.1%})" for part in GOALS]
    return f"| {one.workload} | {' | '.join(cells)} | {one.cost_ns / 1e6:.1f} ms |"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, and return 1 where anything is too far off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=list(JOBS), help="of the workloads; repeatable")
    args = parser.parse_args(argv)
    every = []
    print(head(), flush=True)
    for workload in args.only or JOBS:
        with tempfile.TemporaryDirectory() as folder:
            every.append(compare(workload, Path(folder)))
        print(line(every[-1]), flush=True)
    misses = [f"{one.workload}: {part} is {one.off(part):+.1%} off" for one in every for part in one.misses]
    print("\n".join(misses), file=sys.stderr)
    return int(bool(misses))


if __name__ == "__main__":
    raise SystemExit(main())
