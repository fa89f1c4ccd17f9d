"""What `dlprof scale` is worth on simulated GPUs: jobs on a few ranks, and the step that it predicts for 8 × as many.

    python -m benchmarks.scaling --seeds 8

Each job is simulated and recorded on 2, 4 and 8 ranks (of one host, or of two), and simulated on 64 to know the truth.
Prints a table for docs/accuracy.md. Even seeds are for tuning, odd ones are held out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dlprof.analysis.scaling.predictions import replays_of, studied
from dlprof.analysis.scaling.study import Named, sizes
from dlprof.commands.report import analyse
from dlprof.result.scale import Study
from simulator import folder, play
from simulator.faults.fault import base, recording, step_of
from simulator.job import Gradients, Job

MEASURED, TARGET = (2, 4, 8), 64
EARLIER = 60  # steps of the simulations that tell the truth
STEPS = 150  # of a recording, at least: loaders stall now and then


@dataclass(frozen=True)
class Family:
    """A kind of job, on any number of ranks."""

    name: str
    make: Callable[[int, int], Job]  # of a seed and a number of ranks
    strong: bool = False


def _ddp(seed: int, ranks: int) -> Job:
    return base(seed, ranks)


def _slow_link(seed: int, ranks: int) -> Job:
    """Gradients over a network that backward passes hide in part."""
    job = base(seed, ranks)
    return replace(job, gradients=replace(job.gradients, bus=float(np.random.default_rng(seed).uniform(4e9, 12e9))))


def _after(seed: int, ranks: int) -> Job:
    """Gradients exchanged one by one behind the backward pass: every start counts."""
    job = base(seed, ranks)
    return replace(job, gradients=Gradients("after", bus=job.gradients.bus))


def _fsdp(seed: int, ranks: int) -> Job:
    job = base(seed, ranks)
    return replace(job, gradients=Gradients("fsdp", bus=40e9))


def _uneven(seed: int, ranks: int) -> Job:
    """Ranks whose devices differ by a few percent, as those of a large machine do."""
    job = base(seed, ranks)
    rng = np.random.default_rng((seed, 5))
    spread = float(rng.uniform(0.01, 0.04))
    speeds = 1 + spread * np.abs(np.random.default_rng((seed, 6)).standard_normal(4096))
    return replace(job, speeds=tuple((r, float(speeds[r])) for r in range(ranks)))


def _jittery(seed: int, ranks: int) -> Job:
    """Steps whose length varies from rank to rank and step to step: the host's share does."""
    job = base(seed, ranks)
    script = replace(job.script, items=1)
    return replace(job, script=script, host=replace(job.host, step_jitter=0.3, jitter=0.5))


def _strong(seed: int, ranks: int) -> Job:
    job = base(seed, ranks, low=100e6, high=400e6)
    assert job.loader is not None
    tokens = max(round(job.model.tokens / ranks / 64) * 64, 64)
    left = tokens / job.model.tokens
    fetch, cpu, collate = (round(ns * left) for ns in (job.loader.fetch, job.loader.cpu, job.loader.collate))
    return replace(
        job,
        model=replace(job.model, tokens=tokens),
        loader=replace(job.loader, fetch=fetch, cpu=cpu, collate=collate),
        batch=replace(job.batch, size=round(job.batch.size * left)),
    )


def _small(seed: int, ranks: int) -> Job:
    """Small models, whose gradients are exchanged one by one: most of the step is the start of collectives."""
    return replace(base(seed, ranks, low=4e6, high=12e6), gradients=Gradients("after"))


def _stalls(seed: int, ranks: int) -> Job:
    """Loaders that just keep up, and now and then do not: the more ranks, the more often one of them is late."""
    job = base(seed, ranks)
    loader = job.loader
    assert loader is not None
    fetch = round(float(np.random.default_rng((seed, 7)).uniform(0.6, 0.8)) * loader.workers * step_of(job))
    return replace(job, loader=replace(loader, fetch=fetch, cpu=round(0.2 * fetch), jitter=0.5, prefetch=1))


def _very_uneven(seed: int, ranks: int) -> Job:
    """Ranks whose devices differ by 6 %, the standard deviation, and the slowest of many by a sixth."""
    job = base(seed, ranks)
    speeds = np.exp(0.06 * np.random.default_rng((seed, 8)).standard_normal(4096))
    return replace(job, speeds=tuple((r, float(speeds[r])) for r in range(ranks)))


FAMILIES = (
    Family("DDP", _ddp),
    Family("DDP, a slow network", _slow_link),
    Family("all-reduces behind the backward pass", _after),
    Family("FSDP", _fsdp),
    Family("DDP, uneven devices", _uneven),
    Family("DDP, jittery hosts that read the loss", _jittery),
    Family("DDP, strong scaling", _strong, strong=True),
    Family("small models, all-reduces behind the backward pass", _small),
    Family("DDP, loaders that stall", _stalls),
    Family("DDP, very uneven devices", _very_uneven),
)


def study(family: Family, seed: int, at: Path, measured: Sequence[int] = MEASURED, target: int = TARGET) -> Study:
    """Simulate, record and study a job; return the study with the prediction for `target` ranks."""
    runs, paths = list[Named](), dict[int, list[Path]]()
    for ranks in measured:
        job = family.make(seed, ranks)
        path = at / f"{ranks}"
        recorded = recording(job, "scale")
        folder.write(path, job, replace(recorded, steps=max(recorded.steps, STEPS)))
        runs.append(Named(path.name, analyse(path, 1)))
        paths[ranks] = [path]
    found = replace(sizes(runs), mode="strong" if family.strong else "weak")
    return studied(family.name, found, [target], replays_of(paths, jobs=1))


def main(argv: Sequence[str] | None = None) -> int:
    """Predict every family's step on TARGET ranks, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--each", action="store_true", help="print each job's prediction too")
    args = parser.parse_args(argv)
    errors: dict[bool, list[float]] = {False: [], True: []}
    inside = 0
    print(f"| job | jobs | step on {TARGET} ÷ on {MEASURED[-1]}, true | predicted ÷ true | held out | check |")
    print("|---|---|---|---|---|---|")
    for family in FAMILIES:
        if args.only and family.name not in args.only:
            continue
        of: Mapping[bool, list[float]] = {False: [], True: []}
        grown, checks = list[float](), list[float]()
        for seed in range(args.seeds):
            truth = play.true(family.make(seed, TARGET), steps=EARLIER).period_ns
            with tempfile.TemporaryDirectory() as at:
                made = study(family, seed, Path(at))
            if not made.predictions:
                print(f"{family.name} {seed}: {made.why} {made.left_out}")
                continue
            found = made.predictions[0]
            held = bool(seed % 2)
            of[held].append(found.step_ns / truth)
            errors[held].append(abs(found.step_ns / truth - 1))
            inside += found.low_ns <= truth <= found.high_ns
            grown.append(truth / made.sizes[-1].step_ns)
            if args.each:
                bounds = [round(x / truth, 3) for x in (found.low_ns, found.step_ns, found.high_ns)]
                print(f"  {family.name}, seed {seed}: interval and step over the true step {bounds}", flush=True)
            checks.append(0.0 if made.check is None else made.check.step_ns / made.sizes[-1].step_ns)
        cells = [_span(grown), _span(of[False]), _span(of[True]), _span(checks)]
        print(f"| {family.name} | {args.seeds} | {' | '.join(cells)} |", flush=True)
    every = errors[False] + errors[True]
    if errors[True]:
        print(
            f"\nheld out: {statistics.median(errors[True]):.1%} off in the median, {max(errors[True]):.1%} at most;"
            f" {sum(e <= 0.1 for e in errors[True])} of {len(errors[True])} within 10 %;"
            f" the 95 % interval holds {inside} of {len(every)} true steps"
        )
    return 0


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.3f} … {max(values):.3f}" if values else "—"


if __name__ == "__main__":
    raise SystemExit(main())
