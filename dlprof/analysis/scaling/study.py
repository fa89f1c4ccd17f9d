"""Runs of one job on several numbers of ranks: throughput, efficiency, and which part of the step grows.

Weak scaling: each rank has the same batch, however many there are. Strong scaling: all ranks share one batch. Either
way, efficiency is the work that a rank does in a second over that of a rank of the smallest size. Runs of one
size count as one. A run is left out, and reported, if its settings differ in more than its size requires.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from dlprof.analysis.compare.comparison import Setting, differing
from dlprof.analysis.compare.ladder import other_job, script_of
from dlprof.result import Result
from dlprof.result.scale import TRANSFER, WAITING, Mode, Size
from dlprof.units import count, few

# Samples of a step that differ by less are as many: the last batch of an epoch is smaller.
_SAME = 0.02

# Facts that follow from the number of ranks, or that a launcher sets by it.
_OF_SIZE = {
    ("Job", "ranks"),
    ("Job", "hosts"),
    ("Job", "backend"),
    ("Job", "command"),
    ("Optimizer", "lr"),  # often set by the number of ranks, and no step is longer for it
    ("Model", "class"),
    ("Model", "parameters"),
    ("Model", "parameter bytes"),
    ("Model", "trainable parameters"),
    ("Model", "last bucket bytes"),
    ("Model", "modules"),
    ("Device", "name"),
    ("Device", "cpu affinity"),
    ("Device", "memory"),
}
# What a model on one rank does not have.
_WRAPPERS = ("ddp", "fsdp", "replicas")
_SAMPLERS = ("sampler", "shuffle", "batches", "length", "dataset length")
_MOST_NAMED = 3


class Named(Struct, frozen=True):
    """A run: its name, and its result."""

    name: str
    result: Result


class Sizes(Struct, frozen=True):
    """The runs by size, in ascending order, and what was left out, and why."""

    mode: Mode
    sizes: tuple[Size, ...]
    runs: tuple[tuple[Named, ...], ...]  # of each size
    left_out: tuple[tuple[str, str], ...]
    doubts: tuple[str, ...]


def sizes(runs: Sequence[Named], left_out: Iterable[tuple[str, str]] = ()) -> Sizes:
    """Return what runs of one job show by their number of ranks."""
    out, kept = list(left_out), list[Named]()
    first: Result | None = None
    for run in sorted(runs, key=lambda run: run.result.run.world_size):
        why = _unusable(run.result) or ("" if first is None else _unlike(first, run.result))
        if why:
            out.append((run.name, why))
            continue
        first = first or run.result
        kept.append(run)
    by: dict[int, list[Named]] = {}
    for run in kept:
        by.setdefault(run.result.run.world_size, []).append(run)
    mode = _mode({n: [_samples(r.result) for r in of] for n, of in by.items()})
    # All runs of one size must have the same batch: a mean of two batches means nothing.
    for n, of in by.items():
        for run in of[1:]:
            mine, theirs = _samples(run.result), _samples(of[0].result)
            if mine and theirs and abs(mine / theirs - 1) > _SAME:
                out.append((run.name, f"its steps have other samples than those of {of[0].name}"))
        by[n] = [run for run in of if run.name not in dict(out)]
    made = [_size(n, of) for n, of in sorted(by.items())]
    return Sizes(
        mode,
        tuple(_compared(made[0], one) for one in made) if made else (),
        tuple(tuple(of) for _, of in sorted(by.items())),
        tuple(out),
        tuple(_doubts(mode, kept, len(made))),
    )


def _unusable(result: Result) -> str:
    """Return why a run is in no size; "" where it may be."""
    if result.window is None:
        return "no steady step was recorded"
    if result.window.unit == "trace":
        return "its trace has no step markers"
    if result.run.missing_ranks:
        return f"{count(len(result.run.missing_ranks), 'rank')} of {result.run.world_size} is missing"
    return ""


def _unlike(first: Result, result: Result) -> str:
    """Return why a run is not another size of the same job; "" where it may be."""
    if why := other_job(first, result):
        return why
    chosen, _ = differing(first, result)
    alone = 1 in (first.run.world_size, result.run.world_size)
    same = [s for s in chosen if (s.section, s.name) not in _OF_SIZE and not _of_loader(s)]
    same = [s for s in same if not (alone and s.name.startswith(_WRAPPERS))]
    if not same:
        return ""
    named = [f"{s.name} {s.a or 'none'} → {s.b or 'none'}" for s in same]
    return f"it ran with other settings than the smallest size: {few(named, _MOST_NAMED)}"


def _of_loader(setting: Setting) -> bool:
    """Return whether a loader's setting follows from the number of ranks: its share of the data, or its batch."""
    return setting.section == "Loader" and (setting.name in _SAMPLERS or "batch" in setting.name)


def _samples(result: Result) -> float | None:
    """Return the samples of a step of the whole job; None: not known."""
    known = result.window.throughput if result.window else None
    if known is None or not known.samples_per_step:
        return None
    return known.samples_per_step * (result.run.world_size if known.of == "rank" else 1)


def _mode(samples: dict[int, list[float | None]]) -> Mode:
    """Return how the batch grows with the ranks."""
    if len(samples) < 2:
        return ""
    each = {n: [s for s in of if s] for n, of in samples.items()}
    if not all(each.values()):
        return ""
    means = {n: sum(of) / len(of) for n, of in each.items()}
    smallest = min(means)
    if all(abs(s / means[smallest] / (n / smallest) - 1) <= _SAME for n, s in means.items()):
        return "weak"
    return "strong" if all(abs(s / means[smallest] - 1) <= _SAME for s in means.values()) else "mixed"


def _size(ranks: int, runs: Sequence[Named]) -> Size:
    windows = [w for run in runs if (w := run.result.window)]
    steps = [w.step_ns for w in windows]
    mean = sum(steps) / len(steps)
    within = [w.noise_ns for w in windows]
    noise = None if any(n is None for n in within) else math.sqrt(sum((n or 0.0) ** 2 for n in within)) / len(within)
    if len(steps) > 1:
        apart = math.sqrt(sum((s - mean) ** 2 for s in steps) / (len(steps) - 1) / len(steps))
        noise = max(noise or 0.0, apart)
    samples = [s for run in runs if (s := _samples(run.result))]
    parts: dict[str, float] = {}
    for run in runs:
        for category, ns in _parts(run.result).items():
            parts[category] = parts.get(category, 0.0) + ns / len(runs)
    mfu = [w.mfu for w in windows if w.mfu is not None]
    joules = [t.power_w / t.samples_per_s for w in windows if (t := w.throughput) and t.power_w and t.samples_per_s]
    return Size(
        ranks=ranks,
        runs=tuple(run.name for run in runs),
        step_ns=mean,
        noise_ns=noise,
        samples=sum(samples) / len(samples) if len(samples) == len(runs) else None,
        hosts=max(len(run.result.run.hosts) or 1 for run in runs),
        parts=parts,
        mfu=sum(mfu) / len(mfu) if len(mfu) == len(windows) else None,
        joules=sum(joules) / len(joules) if len(joules) == len(windows) else None,
    )


def _parts(result: Result) -> dict[str, float]:
    """Return the mean over the ranks of each part of a step, ns; exposed communication by transfer and waiting."""
    ranks = max(len({part.rank for part in result.time}), 1)
    parts: dict[str, float] = {}
    for part in result.time:
        parts[part.category] = parts.get(part.category, 0.0) + part.ns / ranks
    known = result.scaling
    if known is not None and known.wait_ns is not None and "communication" in parts:
        whole = parts.pop("communication")
        parts[WAITING] = min(known.wait_ns, whole)
        parts[TRANSFER] = whole - parts[WAITING]
    return {category: ns for category, ns in parts.items() if ns > 0}


def _compared(first: Size, size: Size) -> Size:
    """Return a size with its speed-up and efficiency over the smallest."""
    if size.samples and first.samples:
        speedup = size.work_per_s / first.work_per_s
    else:
        # Without samples each rank is taken to do the same work in a step.
        speedup = first.step_ns / size.step_ns * size.ranks / first.ranks
    efficiency = speedup * first.ranks / size.ranks
    noises = [s.noise_ns / s.step_ns for s in (first, size) if s.noise_ns is not None]
    noise = efficiency * math.hypot(*noises) if len(noises) == 2 and size is not first else None
    return replace(size, speedup=speedup, efficiency=efficiency, efficiency_noise=noise)


def _doubts(mode: Mode, runs: Sequence[Named], sizes: int) -> Iterable[str]:
    if mode == "" and sizes > 1:
        yield "How many samples a step has is not known: each rank is taken to do the same work at every size."
    elif mode == "mixed":
        yield "The batch grows neither with the ranks nor stays as it is: sizes compare by samples only."
    for run in runs:
        load = run.result.foreign_load
        if load is not None and load.disturbs:
            yield f"{run.name}: programs outside the job used the cores that it would have used."
    if not any(map(script_of, (run.result for run in runs))):
        yield "No run says which script it ran: that all are of one job is not known."
