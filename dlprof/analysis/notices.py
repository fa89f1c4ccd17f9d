"""The warnings of a report: missing ranks, traced steps unlike the others, what was not recorded."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, Measured, maybe, needs
from dlprof.analysis.host.gaps import launch_means
from dlprof.analysis.input.loader import fed_ns
from dlprof.analysis.machine.cores import bindings, far_from_gpu
from dlprof.analysis.machine.samples import foreign_load, sample_means
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import later_windows, traced_again, window_likeness
from dlprof.analysis.step.whole_job import whole_job
from dlprof.analysis.timeline.device import NOT_IN_STEPS
from dlprof.analysis.timeline.steps import step_means
from dlprof.analysis.timeline.what_if import REPRODUCED, replayed_steps
from dlprof.read.run import once_each
from dlprof.units import count, digits, duration, few, percent, ranks_named, size, used_by_others

# A trace that links less of the device's work to its launches has a warning.
_LINKED = 0.5

# Unattributed time has a warning from this share of the step on.
_NOTABLE_REST = 0.05

# Warming up has a warning from this share of the training time on, and from a minute on: a short trial is mostly that,
# and whoever runs one knows it. The panel of the whole job has it in any case.
_NOTABLE_WARMUP, _LONG_WARMUP_NS = 0.2, 60e9

MOST_WARNINGS = 40

# Steps of the ranks of one job are about as long, as ranks wait for each other; stages of a pipeline differ by less.
_UNLIKE = 10

# Bytes a second read back from swap, from which a host is said to lack memory.
_SWAPPING = 1e6

_PHASES = {
    "fetch": "while the script waits for data",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
}

# Traced steps are like the others within these ratios of length (a profiler slows the host, and not the device).
_ALIKE = (0.9, 1.3)
# Steps after the window have a warning if they are longer by this factor, and by so many standard errors. In recordings
# of an H200 in a virtual machine, from which CUPTI was gone by then, they were up to 4.0 of these longer or shorter.
_SLOWER, _SURE = 1.05, 5.0


def all_warnings(run: Measured) -> list[str]:
    """Return the warnings of a run, a sentence each: the recorder's first, measures that failed last."""
    return [*run.call(warnings), *_of_ranks(run)]


def warnings(
    job: Job = needs(JOB),
    step_means: Maybe[Frame] = maybe(step_means),
    breakdown: Maybe[Frame] = maybe(breakdown),
    window_likeness: Maybe[Frame] = maybe(window_likeness),
    foreign_load: Maybe[Frame] = maybe(foreign_load),
    whole_job: Maybe[Frame] = maybe(whole_job),
    bindings: Maybe[Frame] = maybe(bindings),
    replayed_steps: Maybe[Frame] = maybe(replayed_steps),
    fed_ns: Maybe[float] = maybe(fed_ns),
    launch_means: Maybe[Frame] = maybe(launch_means),
    sample_means: Maybe[Frame] = maybe(sample_means),
    later_windows: Maybe[Frame] = maybe(later_windows),
) -> list[str]:
    """Return the warnings about what was recorded and measured."""
    found, missing = list(job.run.warnings), job.missing_ranks
    if missing:
        are = "is" if len(missing) == 1 else "are"
        found.append(f"{len(missing)} of {job.world_size} ranks {are} missing: {few(missing, 12)}")
    found += _of_untraced(job)
    if (again := later_windows.or_none()) is not None and len(again):
        read = max(((job.facts[rank].get("window") or {}).get("number") or 1 for rank in job.ranks), default=1)
        found.append(traced_again(again, read))
    if settings.of_inference(job):
        found.append("the traces are of an inference server: dlprof is about training, and no rule applies")
    elif settings.only_forward(job):
        found.append("the traces hold no backward pass and no optimizer: they are of inference")
    if settings.loader_alone(job):
        found.append("the loader alone was run: its rate is the most that training with it can reach")
    found += _of_jobs(job)
    found += _of_groups(job)
    found += _of_processes(job)
    found += _of_others(job, foreign_load.or_none())
    found += _of_swapping(sample_means.or_none())
    if far := far_from_gpu(bindings.get()) if bindings.or_none() is not None else "":
        found.append(
            f"{far}: launches and copies cross the link between the nodes, at a cost that no recording shows"
            " (`srun --cpu-bind` or `torchrun --numa-binding=node` brings them together)"
        )
    means, likeness = step_means.or_none(), window_likeness.or_none()
    step, fed = 0.0 if means is None else float(means["step_ns"].mean()), fed_ns.or_none() or 0.0
    if 0 < _ALIKE[1] * step < fed:
        found.append(f"the steps use up batches made at the start: their loader needs {duration(fed)} for a step's")
    if means is not None:
        found += _of_lengths(means)
    found += _of_outside(launch_means.or_none())
    if likeness is not None:
        replays = replayed_steps.or_none()
        reproduced = replays is not None and (replays["off"].abs() <= REPRODUCED).all()
        found += _of_window(job, likeness, reproduced=bool(reproduced))
    if means is not None and breakdown.or_none() is not None:
        found += _of_rest(job, means.set_index("rank"), part(breakdown.get(), "other"))
    elif means is not None and not breakdown.broke:
        found.append(f"where the time goes was not measured: {breakdown.why()}")
    return found + (_of_warmup(whole_job.get()) if whole_job.or_none() is not None else [])


def _of_untraced(job: Job) -> list[str]:
    """Say how many ranks a trace was requested from, where not from all."""
    untraced = {r: (job.facts[r].get("window") or {}).get("asked") for r in settings.untraced_by_choice(job)}
    if not untraced:
        return []
    traced = len(job.ranks) - len(untraced)
    return [
        f"traces of {traced} of {count(len(job.ranks), 'rank')} were asked for"
        f" (--ranks {next(iter(untraced.values()))}):"
        " who waits for whom, and what else takes every rank's trace, is not measured"
    ]


def _of_jobs(job: Job) -> list[str]:
    """Say where ranks of several SLURM jobs are in one folder."""
    envs = [job.facts[rank].get("env") for rank in job.ranks]
    jobs = sorted({str(env["SLURM_JOB_ID"]) for env in envs if isinstance(env, Mapping) and "SLURM_JOB_ID" in env})
    if len(jobs) < 2:
        return []
    return [f"the ranks are of {len(jobs)} SLURM jobs ({few(jobs, 8)}): what is said of all ranks holds for no one job"]


def _of_groups(job: Job) -> list[str]:
    """Say where several ranks of a launcher, all recorded, have never met: each then trains a model of its own."""
    recorded = [job.facts[rank] for rank in job.ranks if "backend" in job.facts[rank]]
    if len(recorded) < 2 or any(one["backend"] for one in recorded) or len(recorded) < len(job.ranks):
        return []
    return [
        f"the {len(recorded)} ranks have formed no process group of torch.distributed: unless they exchange gradients"
        f" in another way, as Horovod's do, these are {len(recorded)} trainings that know nothing of each other"
    ]


# What slows a whole process at a cost that no recording shows: a fact of the process, or a variable and its values.
_SLOWED = {
    "development": "Python's development mode is on (`-X dev`, `PYTHONDEVMODE`)",
    "sanitizer": "a library checks memory or threads ({})",
    "malloc": "`PYTHONMALLOC={}` is set",
}
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for each kernel"),
    "HIP_LAUNCH_BLOCKING": ("1", "the host waits for each kernel"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is compared with the other ranks' first"),
    "NCCL_DEBUG": ("TRACE", "NCCL writes down each call"),
}


def _of_processes(job: Job) -> list[str]:
    """Say what slows the ranks' processes for debugging, at a cost that is not known."""
    found: dict[str, list[int]] = {}
    for rank in job.ranks:
        state, env = job.facts[rank].get("process") or {}, job.facts[rank].get("env") or {}
        texts = [text.format(_listed(state[name])) for name, text in _SLOWED.items() if state.get(name)]
        texts += [f"`{name}={value}`: {why}" for name, (value, why) in _SLOWING.items() if env.get(name) == value]
        for text in texts:
            found.setdefault(text, []).append(rank)
    return [
        f"{text}, on {ranks_named(ranks)}: what that costs is not known; it is for debugging"
        for text, ranks in found.items()
    ]


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _of_lengths(means: pd.DataFrame) -> list[str]:
    """Say where ranks' steps are so unlike that they can hardly be of one job, or in one unit."""
    steps = means.set_index("rank")["step_ns"]
    if steps.min() <= 0 or steps.max() < _UNLIKE * steps.min():
        return []
    return [
        f"a step of rank {steps.idxmax()} takes {digits(float(steps.max() / steps.min()))} × as long as one of rank"
        f" {steps.idxmin()}: they are of several jobs, or their times are in different units (µs and ns are 1,000 ×"
        " apart); means over the ranks say little"
    ]


def _of_outside(launched: pd.DataFrame | None) -> list[str]:
    """Say which ranks' traces hold kernels, but none within a step."""
    if launched is None:
        return []
    outside = launched.loc[(launched["kernels"] == 0) & (launched["kernel_ns"] > 0), "rank"].tolist()
    return [f"{NOT_IN_STEPS} (rank {few(outside, 8)}): no step shows what it does"] if len(outside) else []


def _of_swapping(means: pd.DataFrame | None) -> list[str]:
    """Say how much the hosts read back from swap while training was steady, where that is notable."""
    if means is None:
        return []
    rates = means.loc[(means["source"] == "host") & (means["metric"] == "swap_in_bytes_per_s"), "mean"]
    if rates.empty or rates.max() < _SWAPPING:
        return []
    return [
        f"a host reads {size(rates.max())} a second back from swap while training is steady: it lacks memory, and what"
        " waits for these pages looks slow (smaller batches, fewer workers or caches)"
    ]


def _of_others(job: Job, frame: pd.DataFrame | None) -> list[str]:
    """Say on which hosts other programs took cores that the job would have used."""
    rows = [] if frame is None else frame[frame["disturbs"] == 1].to_dict("records")
    if not rows:
        return []
    first = rows[0]
    waited = None if pd.isna(first["waited"]) else float(first["waited"])
    of = f"on {first['host']}, the most disturbed of {count(len(rows), 'host')}, " if len(rows) > 1 else ""
    words = used_by_others(first["foreign"], first["cores"], waited)
    nice = {r: n for r in job.ranks if (n := (job.facts[r].get("process") or {}).get("nice"))}
    if nice:
        words += f" ({ranks_named(list(nice))} gave way to them: niceness {max(nice.values())}, by `nice`)"
    return [f"{of}{words}: the figures are of a run under that load, and it cannot rule out bottlenecks"]


def _of_warmup(frame: pd.DataFrame) -> list[str]:
    """Say where much of the training was warming up, which no figure is of."""
    sums = frame.groupby("part")[["steps", "ns"]].sum() / max(frame["rank"].nunique(), 1)
    trained = sums.reindex(["warmup", "steady", "traced", "epoch_ends"]).fillna(0.0)
    warming, total = float(trained["ns"]["warmup"]), float(trained["ns"].sum())
    if not trained["steps"]["steady"] or warming < max(_NOTABLE_WARMUP * total, _LONG_WARMUP_NS):
        return []
    steps = count(round(float(trained["steps"]["warmup"])), "step")
    return [
        f"{percent(warming / total)} of the training time went to warming up (the first {steps}, {duration(warming)}):"
        " the figures are of the steps after it"
    ]


def _of_window(job: Job, frame: pd.DataFrame, *, reproduced: bool) -> list[str]:
    """Say where the traced steps of a device job differ from the others, and what the trace lacks.

    `reproduced`: without what the profiler costs they are as long as the others, so that they stand for them.
    """
    found = []
    ratio, after = frame["ratio"].mean(), frame["after"].mean()
    if not pd.isna(ratio) and not _ALIKE[0] <= ratio <= _ALIKE[1] and not (ratio > 1 and reproduced):
        why = "the profiler slows the host, and the device waits for it"
        if ratio < 1:
            why = "the host waits less in them (for data, other ranks or the launch queue)"
        found.append(f"the traced steps take {digits(ratio)} × as long as the others: {why}; shares are of these steps")
    if after > _SLOWER and after - 1 > _SURE * frame["after_noise"].mean():
        torn = {(job.facts[r].get("window") or {}).get("cupti_torn_down") for r in job.ranks}
        phase = _PHASES.get(str(frame["longer"].iloc[frame["after"].argmax()]), "")
        why = f", most of the difference {phase}" if phase else ""
        why = ": the profiler is still attached to the GPU" if torn != {True} else why
        found.append(f"steps after the traced ones take {digits(after)} × as long as those before{why}")
    if len(frame) and (left := [why for why in frame["left_out"] if why]):
        found.append(f"left out of what was traced: {max(left, key=left.count)}")
    linked = float(frame["linked"].min()) if len(frame) else 1.0
    if not linked:
        found.append(
            "the trace links no launch to the device's work: steps are cut at the host's marks, the last one ends with"
            " the device's work, and idle time is attributed to the host; single steps are wrong where the device lags"
        )
    elif linked < _LINKED:
        found.append(
            f"the trace links {percent(linked)} of the device's work to its launch; the rest is assigned to the step of"
            " its neighbours on the same stream"
        )
    return found


def _of_rest(job: Job, means: pd.DataFrame, rest: Mapping[int, float]) -> list[str]:
    """Say what is known of the unattributed time of a step, where it is large."""
    untraced = settings.untraced_by_choice(job)
    shares = {r: ns / float(means["step_ns"].loc[r]) for r, ns in rest.items() if r not in untraced}
    worst = max(shares, key=lambda r: shares[r], default=None)
    if worst is None or shares[worst] < _NOTABLE_REST:
        return []
    of = f"{percent(shares[worst])} of a step" + (f" of rank {worst}" if len(job.ranks) > 1 else "")
    if not means["traced_steps"].loc[worst]:
        return [f"{of} is not attributed to any category, except that it is no input wait: no step was traced"]
    if means["source"].loc[worst] == "trace":
        return [f"{of} is not attributed to any category: the trace does not record what the rank did meanwhile"]
    return [
        f"{of} is not in the traced steps: the others are longer by that much, for a reason that was neither traced nor"
        " recorded (`--window 10,2,20` traces more steps)"
    ]


def _of_ranks(run: Measured) -> list[str]:
    found = [(f"rank {rank}", text) for rank, texts in run.warnings.items() for text in texts]
    lines = once_each(found, "ranks") if len(run.ranks) > 1 else list(dict.fromkeys(text for _, text in found))
    for text, ranks in run.failures().items():
        where = f" (ranks {few(ranks, 8)})" if ranks else ""
        lines.append(f"a measure failed, and what needs it is missing: {text}{where}")
    extra = len(lines) - MOST_WARNINGS
    return lines[:MOST_WARNINGS] + ([f"… and {extra} more warnings"] if extra > 0 else [])
