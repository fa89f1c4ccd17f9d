"""What `dlprof whatif` is worth on GPUs that are simulated: predicted steps against those of the changed jobs.

    python -m benchmarks.whatif --seeds 4

Each job is simulated and recorded, and what is asked of its recording is then done: the job with a device twice as
fast, another number of workers, more micro-batches, … is simulated as well. Prints a table for docs/accuracy.md. Even
seeds are for tuning, odd ones are held out. What a device does faster in the simulation is all of its kernels.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlprof.analysis.whatif import PERFECT, Request, answers
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from simulator import folder, play
from simulator.faults import FAULTS
from simulator.faults.fault import base, recording
from simulator.job import Job


@dataclass(frozen=True)
class Question:
    """What is asked of a job, and how the job is changed by it."""

    name: str
    make: Callable[[int], Job]
    asked: Request
    change: Callable[[Job], Job]
    steps: int = 60


def _fault(name: str) -> Callable[[int], Job]:
    return next(f for f in FAULTS if f.name == name).make


def _fix(name: str) -> Callable[[Job], Job]:
    return next(f for f in FAULTS if f.name == name).fix


def _faster(job: Job, device: float = 1.0, host: float = 1.0) -> Job:
    ranks = range(job.ranks)
    speeds = {r: dict(job.speeds).get(r, 1.0) / device for r in ranks}
    hosts = {r: dict(job.host_speeds).get(r, 1.0) / host for r in ranks}
    return replace(job, speeds=tuple(speeds.items()), host_speeds=tuple(hosts.items()))


def _workers(job: Job, workers: int) -> Job:
    assert job.loader is not None
    return replace(job, loader=replace(job.loader, workers=workers))


def _made(job: Job, factor: float) -> Job:
    loader = job.loader
    assert loader is not None
    fetch, cpu, collate = (round(ns / factor) for ns in (loader.fetch, loader.cpu, loader.collate))
    return replace(job, loader=replace(loader, fetch=fetch, cpu=cpu, collate=collate))


def _network(job: Job, factor: float) -> Job:
    return replace(job, gradients=replace(job.gradients, bus=job.gradients.bus * factor))


def _tight(seed: int) -> Job:
    """A job whose loader just keeps up."""
    job = base(seed)
    assert job.loader is not None
    from simulator.healthy import compute_ns

    step = compute_ns(job.model, job.device)
    fetch = round(0.85 * job.loader.workers * step)
    return replace(job, loader=replace(job.loader, fetch=fetch, cpu=round(0.2 * fetch), jitter=0.05))


def _pipeline(job: Job, **changed: object) -> Job:
    assert job.pipeline is not None
    return replace(job, pipeline=replace(job.pipeline, **changed))  # type: ignore[arg-type]


_FEW, _AFTER, _LAUNCHES = _fault("few_workers"), _fault("after_backward"), _fault("many_launches")
_BOTH = Request(network=2.0, device=2.0)

QUESTIONS = (
    Question("device 2x", base, Request(device=2.0), lambda j: _faster(j, device=2)),
    Question("device 2x, a loader that just kept up", _tight, Request(device=2.0), lambda j: _faster(j, device=2)),
    Question("device 2x, a slow host", _LAUNCHES, Request(device=2.0), lambda j: _faster(j, 2)),
    Question("host 2x", _LAUNCHES, Request(host=2.0), lambda j: _faster(j, host=2)),
    Question("input perfect", _FEW, Request(input=PERFECT), lambda j: _made(j, 1000)),
    Question("input 2x", _FEW, Request(input=2.0), lambda j: _made(j, 2)),
    Question("workers 8", _FEW, Request(workers=8), lambda j: _workers(j, 8)),
    Question("workers 1", _FEW, Request(workers=1), lambda j: _workers(j, 1)),
    Question("workers 8 and device 2x", _FEW, Request(workers=8, device=2.0), lambda j: _faster(_workers(j, 8), 2)),
    Question("network 2x", _AFTER, Request(network=2.0), lambda j: _network(j, 2)),
    Question("network perfect", _AFTER, Request(network=PERFECT), lambda j: _network(j, 1e4)),
    Question("network 2x and device 2x", _AFTER, _BOTH, lambda j: _faster(_network(j, 2), 2)),
    Question("microbatches 16", _fault("gpipe"), Request(microbatches=16), lambda j: _pipeline(j, microbatches=16), 20),
    Question("schedule 1F1B", _fault("gpipe"), Request(schedule="1F1B"), lambda j: _pipeline(j, schedule="1F1B"), 20),
    Question("stages even", _fault("uneven_stages"), Request(stages=True), _fix("uneven_stages"), 20),
)


def asked(question: Question, seed: int) -> tuple[float, float, float | None, str]:
    """Return the true step now and with the change, the predicted one, and why there is none."""
    job = question.make(seed)
    now, then = (play.true(j, steps=question.steps).period_ns for j in (job, question.change(job)))
    with tempfile.TemporaryDirectory() as at:
        run = Path(at) / "run"
        folder.write(run, job, recording(job, question.name))
        try:
            found = answers(open_run(run), question.asked, jobs=1)
        except NotMeasured as e:
            return now, then, None, str(e)
    answer = found.together or found.alone[0]
    whys = [a.why for a in found.alone if a.step_ns is None]
    return now, then, None if whys else answer.step_ns, "; ".join(whys)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask all questions, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=())
    args = parser.parse_args(argv)
    print("| asked | jobs | changed ÷ now, true | predicted ÷ changed | held out |\n|---|---|---|---|---|")
    errors: list[float] = []
    for question in QUESTIONS:
        if args.only and question.name not in args.only:
            continue
        tuned, held, gains = list[float](), list[float](), list[float]()
        lacking: list[str] = []
        for seed in range(args.seeds):
            now, then, predicted, why = asked(question, seed)
            gains.append(then / now)
            if predicted is None:
                lacking.append(why)
            else:
                (held if seed % 2 else tuned).append(predicted / then)
        errors += [abs(x - 1) for x in held]
        note = f" ({len(lacking)} not known: {lacking[0][:80]})" if lacking else ""
        print(
            f"| `{question.name}` | {args.seeds} | {_span(gains)} | {_span(tuned)}{note} | {_span(held)} |", flush=True
        )
    if errors:
        middle, most = statistics.median(errors), max(errors)
        print(f"\nHeld out: off by {middle:.1%} in the median, {most:.1%} at most, of {len(errors)}.")
    return 0


def _span(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
