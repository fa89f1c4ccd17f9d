"""How near what dlprof counts, and predicts, of a step's memory comes to what the allocator says.

    python -m benchmarks.memory [--only WORKLOAD]... [--simulated SEEDS [--first SEED]] [--checkpoints ROUNDS]

Each reference workload is recorded on the CPU, and then run again without dlprof for as many steps
(benchmarks/allocated.py), which measures the same step by the allocator alone. Prints a row a workload, in Markdown:
for each part what was counted on rank 0, and by how much that is off. Then what the counting cost in the one step that
it takes. Exits with 1 where parameters, gradients or state are off by more than 5 %, or what the forward pass leaves by
more than 10 %.

`--simulated`: instead simulated GPU jobs, of so many seeds, each recorded, and then simulated anew with each change
really made. Prints a row a change: by how much the predicted peaks are off in the median and at the most, of what
tensors hold and of what the allocator reserves, and how often the latter lies between the ends that are given for it.
Exits with 1 where what tensors hold is more than 10 % off.

`--checkpoints`: instead how many times as long a step of a small transformer on the CPU is with checkpoints, predicted
from so many recordings, and as measured: CPU time of one thread, with and without them in turn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlprof.analysis.engine import measure
from dlprof.analysis.memory.changes import memory_changes, memory_what_if
from dlprof.analysis.memory.memory import memory_composition
from dlprof.read.run import open_run
from dlprof.run_folder import lines_of
from simulator import folder as recordings
from simulator import healthy, memory
from simulator.job import Job, Memory, Optimizer, Recording

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
    """Return the bytes of the log `held` by part, with all that the forward pass leaves as `activation`."""
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
    held = json.loads(lines_of(run / "ranks/00000", "held")[-1])
    step = _position(run, held["step"])
    _done([*start, "-m", "benchmarks.allocated", str(folder), str(step), str(script), *options, "--steps", "24"])
    measured = json.loads((folder / "0.json").read_text())
    return Compared(workload, counted(held, also), measured, held["cost_ns"])


def _position(run: Path, step: int) -> int:
    """Return how many optimizer steps came before a step."""
    lines = lines_of(run / "ranks/00000", "steps")
    rows = (json.loads(line) for line in lines)
    return sum(row["optimizer_steps"] for row in rows if row["step"] < step)


def _done(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def head() -> str:
    """Return the first lines of the comparison in Markdown."""
    return f"| workload | {' | '.join(GOALS)} | counting |\n{'|---' * (len(GOALS) + 2)}|"


def line(one: Compared) -> str:
    """Return a workload's line: MB that were counted, and by how much they are off."""
    cells = [f"{one.counted[part] / 1e6:,.2f} ({one.off(part):+.1%})" for part in GOALS]
    return f"| {one.workload} | {' | '.join(cells)} | {one.cost_ns / 1e6:.1f} ms |"


# -- simulated jobs

# Changes of a simulated job, as memory_changes names them.
CHANGES = ("batch 0.5", "batch 2", "batch 4", "batch 8", "checkpoint", "autocast", "fused_attention")

_AMPLE = 10**12  # bytes of a device on which everything fits

# The farthest off that what tensors hold may be predicted.
_GOAL = 0.1


@dataclass(frozen=True)
class Predicted:
    """One change of one job: predicted ÷ true bytes, of what tensors hold, and of what the allocator reserves; and
    the least and the most of the latter.
    """

    seed: int
    change: str
    allocated: float
    reserved: float
    low: float
    high: float


def drawn(seed: int) -> Job:
    """Return a random job on a device that holds whatever it asks for."""
    rng = np.random.default_rng((seed, 5))
    model = replace(
        healthy.draw_model(rng, "A100", low=5e6),
        products=str(rng.choice(("bfloat16", "tf32"))),
        attention=str(rng.choice(("fused", "unfused"))),
        blocks=int(rng.integers(2, 13)),
    )
    optimizer = Optimizer(kind=str(rng.choice(("fused", "foreach", "single"))))
    return Job(model=model, memory=Memory(total=_AMPLE, moments=int(rng.integers(1, 3))), optimizer=optimizer)


def changed(job: Job) -> dict[str, Job]:
    """Return the same job with each change really made."""
    model, of = job.model, job.memory
    assert of is not None
    made = {f"batch {n:g}": replace(job, model=replace(model, tokens=round(n * model.tokens))) for n in (0.5, 2, 4, 8)}
    made["checkpoint"] = replace(job, memory=replace(of, checkpoints=True))
    if model.activations == "float32":
        made["autocast"] = replace(job, model=replace(model, products="bfloat16"))
    if model.attention == "unfused":
        made["fused_attention"] = replace(job, model=replace(model, attention="fused"))
    return made


def simulated(seed: int, folder: Path) -> list[Predicted]:
    """Record a job, and compare what is predicted of it with what the changed jobs take."""
    job = drawn(seed)
    recordings.write(folder, job, Recording(steps=30, skip=5, active=3))
    measured = measure(open_run(folder), (memory_changes, memory_composition), jobs=1)
    frame, parts = measured.frame(memory_changes), measured.frame(memory_composition)
    seen = float(parts.loc[parts["part"] == "libraries", "bytes"].sum())  # of what is outside of the allocator
    found = []
    for change, then in changed(job).items():
        name, _, value = change.partition(" ")
        rows = frame[(frame["change"] == name) & ((frame["value"] == value) | (name != "batch"))]
        if rows.empty:  # checkpoints are not listed where they would not lower the peak
            continue
        row, ran = rows.iloc[0], memory.simulated(then)
        allocated = (row["least_bytes"] - seen) / ran.allocator.peak_allocated
        ends = ((row[f"{name}_bytes"] - seen) / ran.allocator.peak_reserved for name in ("then", "least", "most"))
        found.append(Predicted(seed, change, float(allocated), *map(float, ends)))
    return found


def summary(every: Sequence[Predicted]) -> pd.DataFrame:
    """Return a row a change, and one of all."""
    frame = pd.DataFrame(every)
    off = frame.assign(allocated=(frame["allocated"] - 1).abs(), reserved=(frame["reserved"] - 1).abs())
    off["within"] = (frame["low"] <= 1) & (frame["high"] >= 1)
    off["width"] = frame["high"] - frame["low"]
    rows = []
    for change in (*CHANGES, "all"):
        mine = off if change == "all" else off[off["change"] == change]
        if len(mine):
            a, r = mine["allocated"], mine["reserved"]
            middle = (a.median(), a.max(), r.median(), r.max(), mine["within"].mean(), mine["width"].median())
            rows.append((change, len(mine), *middle))
    names = ["change", "jobs", "tensors: median", "worst", "reserved: median", "worst ", "within", "width"]
    return pd.DataFrame(rows, columns=names)


def _simulated(first: int, seeds: int) -> int:
    every = []
    for seed in range(first, first + seeds):
        with tempfile.TemporaryDirectory() as folder:
            every += simulated(seed, Path(folder) / "run")
    table = summary(every)
    print(f"| {' | '.join(table.columns)} |\n{'|---' * len(table.columns)}|")
    for change, jobs, *shares in table.itertuples(index=False, name=None):
        print(f"| {change} | {jobs} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    misses = [one for one in every if abs(one.allocated - 1) > _GOAL or not one.low <= 1 <= one.high]
    for one in misses:
        print(one, file=sys.stderr)
    return int(any(abs(one.allocated - 1) > _GOAL for one in misses))


# -- what checkpoints cost

_STEPS = """
import statistics, sys, time, torch
sys.path.insert(0, {parts!r})
from parts.language import Transformer
torch.set_num_threads(1)

def stepping(checkpointing):
    model = Transformer(2_000, 128, 128, 4, 6, checkpointing)
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.randint(0, 2_000, ({batch}, 128))
    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens), tokens.flatten()).backward()
        optimizer.step()
        return time.process_time_ns()
    return step

step, other = stepping(False), stepping(True)
if sys.argv[1:] == ["both"]:
    ratios = []
    for _ in range(25):
        before, between, after = time.process_time_ns(), step(), other()
        ratios.append((after - between) / (between - before))
    print(statistics.median(ratios))
else:
    for _ in range(24):
        step()
"""


def checkpoints(batch: int, folder: Path) -> tuple[float, float]:
    """Return how many times as long a step is with checkpoints: as predicted, and as measured."""
    script, run = folder / "train.py", folder / "run"
    script.write_text(_STEPS.format(parts=str(ROOT / "workloads"), batch=batch))
    wrap = [sys.executable, "-m", "dlprof", "wrap", "-o", str(run), "--no-report", "--window", "10,1,5", "--"]
    _done([*wrap, sys.executable, str(script)])
    frame = measure(open_run(run), (memory_what_if,), jobs=1).frame(memory_what_if)
    row = frame[frame["change"] == "checkpoint"].iloc[0]
    return float(row["then_ns"] / row["now_ns"]), float(_done([sys.executable, str(script), "both"]))


def _checkpoints(rounds: int) -> int:
    print("| batch | predicted | measured |\n|---|---|---|")
    for batch in (2, 8):
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                predicted, measured = checkpoints(batch, Path(folder))
            print(f"| {batch} | {predicted:.2f} | {measured:.2f} |", flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, and return 1 where anything is too far off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=list(JOBS), help="of the workloads; repeatable")
    parser.add_argument("--simulated", type=int, default=0, metavar="SEEDS", help="simulated jobs instead; how many")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="of the simulated jobs")
    parser.add_argument("--checkpoints", type=int, default=0, metavar="ROUNDS", help="instead what checkpoints cost")
    args = parser.parse_args(argv)
    if args.checkpoints:
        return _checkpoints(args.checkpoints)
    if args.simulated:
        return _simulated(args.first, args.simulated)
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
