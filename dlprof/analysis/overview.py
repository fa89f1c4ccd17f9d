"""The run as a whole: what it is, and its facts.

The settings of the job that its recording overrode (`--set`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from dlprof import schema
from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import host_clocks
from dlprof.analysis.compute.operators import tensor_cores
from dlprof.analysis.compute.peaks import arithmetic
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, Measured, maybe, needs, per_rank
from dlprof.analysis.host.stacks import DOING
from dlprof.analysis.input.loader import before_forward, loader_means
from dlprof.analysis.machine.samples import foreign_load, sample_means
from dlprof.analysis.memory.memory import memory_use
from dlprof.analysis.panel import MOST_RANKS
from dlprof.analysis.step.throughput import of_throughput
from dlprof.analysis.timeline.steps import mean_step_ns, phases_of_step, step_means
from dlprof.analysis.timeline.what_if import replayed_steps
from dlprof.errors import NotMeasured
from dlprof.overrides import Outcome, described
from dlprof.plain import command_line
from dlprof.result import Fact, RunInfo
from dlprof.units import digits, duration, percent, quantity, size


@dataclass(frozen=True)
class _Section:
    """Collects the facts of one section; unknown values are left out."""

    name: str
    facts: list[Fact] = field(default_factory=list)

    def add(self, name: str, value: object) -> None:
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        if value not in (None, "", [], ()):
            self.facts.append(Fact(self.name, name, text[:2000]))


def run_info(job: Job, warnings: Sequence[str]) -> RunInfo:
    """Return which run this is, on what, and how it ended."""
    hosts = job.run.hosts or _several(job, "host")
    return RunInfo(
        path=job.run.path.name or str(job.run.path),
        command=job.run.command,
        world_size=job.world_size,
        ranks=job.ranks,
        missing_ranks=job.missing_ranks[:1024],
        hosts=tuple(hosts),
        device=_device(job),
        torch=next(iter(_several(job, "versions", "torch")), ""),
        exit=dict(job.run.exit),
        warnings=tuple(warnings),
    )


def _several(job: Job, *path: str) -> list[str]:
    """Return the distinct values of one fact over the ranks, each the recorder's, else the trace's."""
    values: dict[str, None] = {}
    for r in job.ranks:
        for facts in (job.facts[r], job.trace_facts[r]):
            at: Any = facts
            for key in path:
                at = at.get(key) if isinstance(at, Mapping) else None
            if at not in (None, "", [], {}):
                values[", ".join(map(str, at)) if isinstance(at, list) else str(at)] = None
                break
    return list(values)


def _device(job: Job) -> str:
    names: dict[str, None] = {}
    for r in job.ranks:
        recorded = job.facts[r].get("device") or {}
        listed = job.trace_facts[r].get("devices") or []
        name = recorded.get("name") or (listed[0].get("name") if listed else "")
        if recorded.get("type") == "cpu":
            name = "CPU"
        if name:
            names[str(name)] = None
    return ", ".join(names)


def facts(run: Measured) -> tuple[Fact, ...]:
    """Return what is known of the job, by section; where ranks differ, a fact has all their values."""
    return tuple(fact for section in SECTIONS for fact in run.call(section))


def _of_job(job: Job = needs(JOB)) -> list[Fact]:
    section = _Section("Job")
    section.add("command", command_line(job.run.command))
    section.add("folder", Path(job.run.path).name)
    section.add("ranks", f"{len(job.ranks)} of {job.world_size}")
    section.add("hosts", list(job.run.hosts) or _several(job, "host"))
    section.add("backend", _several(job, "backend"))
    if job.apart:
        section.add("process group", "none: each process trains by itself, and is shown as a rank")
    code, signal = job.run.exit.get("code"), job.run.exit.get("signal")
    section.add("ended", f"by signal {signal}" if signal else f"with exit code {code}" if code is not None else "")
    return section.facts


def _of_device(job: Job = needs(JOB)) -> list[Fact]:
    section = _Section("Device")
    section.add("name", _device(job))
    section.add("type", _several(job, "device", "type"))
    section.add("memory", [size(float(n)) for n in _several(job, "device", "memory_bytes") if n.isdigit()])
    section.add("capability", [c.replace(", ", ".") for c in _several(job, "device", "capability")])
    for key in ("count", "affinity", "quota", "torch_threads", "units"):
        section.add(f"cpu {key.replace('_', ' ')}", _several(job, "cpu", key))
    return section.facts


def _of_software(job: Job = needs(JOB)) -> list[Fact]:
    section = _Section("Software")
    for key in ("torch", "cuda", "cudnn", "nccl", "python", "dlprof"):
        section.add(key, _several(job, "versions", key))
    return section.facts


# Facts of a loader and a model that are not settings.
_OF_RANK = ("replica", "reads_sequences")


def _of_settings(job: Job = needs(JOB)) -> list[Fact]:
    found = []
    recorded = {
        "Loader": settings.training_loader(job),
        "Model": settings.model(job),
        "Optimizer": settings.optimizer(job),
    }
    for name, values in recorded.items():
        section = _Section(name)
        for key, value in values.items():
            if isinstance(value, Mapping):
                for inner, of in value.items():
                    section.add(f"{key}.{inner}", of)
            elif key not in _OF_RANK:
                section.add(str(key).replace("_", " "), value)
        found += section.facts
    pipeline = _Section("Pipeline")
    for key in ("schedule", "microbatches", "num_stages"):
        pipeline.add(key.replace("_", " "), _several(job, "pipeline", key))
    return found + pipeline.facts


@per_rank
def override_effects(overrides: Frame = needs(schema.OVERRIDES)) -> pd.DataFrame:
    """Return the table "overrides"; raises NotMeasured where nothing was overridden."""
    if not len(overrides):
        raise NotMeasured("no setting was overridden")
    return overrides.astype({"name": str, "value": str, "before": str, "file": str, "function": str, "error": str})


def _of_overrides(override_effects: Maybe[Frame] = maybe(override_effects)) -> list[Fact]:
    """List the settings that `--set` overrode: what was there before, where, how often, and what failed."""
    section = _Section("Overrides")
    frame = override_effects.or_none()
    for name, rows in () if frame is None else frame.groupby("name", sort=False):
        ranks, places = rows.drop_duplicates("rank"), rows[rows["line"] >= 0]
        outcome = Outcome(
            int(ranks["applied"].sum()),
            tuple(dict.fromkeys(filter(None, ranks["before"]))),
            tuple(places[["file", "line", "function"]].itertuples(index=False, name=None)),
            next(filter(None, ranks["error"]), None),
        )
        section.add(str(name), described(rows["value"].iloc[0], outcome))
    return section.facts


def _of_step(phases_of_step: Maybe[Frame] = maybe(phases_of_step)) -> list[Fact]:
    """List what the training thread does in a mean steady step, by the step log; the mean of the ranks."""
    section = _Section("Mean step, on the training thread")
    frame = phases_of_step.or_none()
    if frame is None:
        return section.facts
    means = frame.groupby("phase", sort=False)[["ns", "share"]].mean()
    for phase, ns, share in means.itertuples():
        section.add(DOING.get(str(phase), str(phase)), f"{duration(ns)} ({percent(share)})" if ns else "")
    micro = frame["micro_batches"].max()
    section.add("one step is", f"{micro:.0f} micro-batches" if micro > 1 else "")
    return section.facts


def _of_loading(
    job: Job = needs(JOB),
    before_forward: Maybe[tuple[int, float] | None] = maybe(before_forward),
    loader_means: Maybe[Frame] = maybe(loader_means),
    mean_step_ns: Maybe[float] = maybe(mean_step_ns),
) -> list[Fact]:
    """List how the queue and the epochs of the training loader went, or the time before the forward without one."""
    section = _Section("Loading")
    before = before_forward.or_none()
    if before is not None:
        before_ns = before[1]
        where = "between the optimizer's step and" if _several(job, "step", "mark") == ["optimizer"] else "before"
        share = percent(before_ns / mean_step_ns.get())
        section.add("no DataLoader", f"{duration(before_ns)} of a step ({share}) {where} the first forward")
    means = loader_means.or_none()
    if means is None:
        return section.facts
    queued = means[(means["empty"] >= 0) & (means["batches"] > 0)]
    if len(queued):
        requested, empty = int(queued["batches"].sum()), int(queued["empty"].sum())
        section.add("queue empty when asked", f"{empty:,} of {requested:,} batches")
        section.add("batches ready when asked", digits(float(queued["ready"].mean())))
    for column, name in (("start_ns", "starting an epoch"), ("first_ns", "first batch"), ("end_ns", "ending an epoch")):
        if means[column].notna().any():
            section.add(name, duration(float(means[column].mean())))
    return section.facts


def _of_precision(job: Job = needs(JOB)) -> list[Fact]:
    section = _Section("Precision")
    for key in ("enabled", "dtype"):
        section.add(f"autocast {key}", _several(job, "autocast", key))
    section.add("gradient scaler", _several(job, "grad_scaler"))
    for key in ("float32_precision", "allow_tf32", "cudnn_benchmark", "deterministic"):
        section.add(key.replace("_", " "), _several(job, "matmul", key))
    return section.facts


def _of_environment(job: Job = needs(JOB)) -> list[Fact]:
    section = _Section("Environment")
    for name in sorted({name for r in job.ranks for name in job.facts[r].get("env") or ()}):
        section.add(name, _several(job, "env", name))
    return section.facts


def _of_arithmetic(
    job: Job = needs(JOB),
    arithmetic: Maybe[Frame] = maybe(arithmetic),
    tensor_cores: Maybe[Frame] = maybe(tensor_cores),
) -> list[Fact]:
    """List what is computed per step, how fast, and the kernels' time in products without tensor cores.

    Names of kernels do not say how busy tensor cores are; the samples of the GPU do.
    """
    section = _Section("Arithmetic")
    frame = arithmetic.or_none()
    if frame is not None:
        means = frame[["flops", "flops_per_s", "mfu", "backward"]].mean()
        section.add("a step and rank", f"{quantity(means['flops'], 'FLOP')}, {percent(means['backward'])} in backward")
        section.add("achieved a rank", f"{quantity(means['flops_per_s'], 'FLOP')}/s")
        known = frame["mfu"].notna().any()
        section.add("MFU", percent(means["mfu"]) if known else f"not known: {frame['why'].iloc[0]}")
        uncounted = (name for r in job.ranks for name in (job.facts[r].get("flops") or {}).get("uncounted") or ())
        section.add("not in it", [*dict.fromkeys(uncounted)])
    elif not arithmetic.broke:
        section.add("not counted", arithmetic.why())
    units = tensor_cores.or_none()
    if units is not None:
        units = units.sort_values("rank")
        for name, column in (
            ("kernels' time in float32 products without tensor cores", "float32_ns"),
            ("kernels' time in products in TF32", "tf32_ns"),
            ("kernels' time in products of unknown unit", "unknown_ns"),
        ):
            section.add(name, _between((units[column] / units["kernel_ns"].clip(lower=1)).tolist(), "share"))
    return section.facts


def _between(values: list[float], unit: str) -> str:
    """Format the values of a few ranks; of many, the least and the largest."""
    if len(values) > MOST_RANKS:
        return f"{quantity(min(values), unit)} to {quantity(max(values), unit)}"
    return ", ".join(quantity(v, unit) for v in values)


def _of_memory(job: Job = needs(JOB), memory_use: Maybe[Frame] = maybe(memory_use)) -> list[Fact]:
    """List the most memory that PyTorch's allocator took on any rank, and its retries."""
    section = _Section("Memory")
    section.add("for pytorch.org/memory_viz", _files(job, "ranks/*/memory_snapshot.pickle"))
    frame = memory_use.or_none()
    if frame is None:
        return section.facts
    total = frame["total_bytes"].min()
    for name, column in (("most allocated", "peak_allocated_bytes"), ("most reserved", "peak_reserved_bytes")):
        most = float(frame[column].max())
        of = "" if pd.isna(total) else f" of {size(total)} ({percent(most / total)})"
        section.add(name, size(most) + of)
    for name, column in (
        ("allocations retried after emptying the cache", "retries"),
        ("allocations that failed", "ooms"),
        ("allocations from the device in the second half", "late"),
    ):
        number = int(frame[column].max())
        section.add(name, f"{number:,}" if number >= 0 else "")
    return section.facts


def _files(job: Job, *patterns: str) -> list[str]:
    """Return the files of a recorded run that match, relative to its folder."""
    found = sorted(path for pattern in patterns for path in job.run.path.glob(pattern)) if job.run.recorded else []
    return [str(path.relative_to(job.run.path)) for path in found]


def _of_samples(
    sample_means: Maybe[Frame] = maybe(sample_means),
    mean_step_ns: Maybe[float] = maybe(mean_step_ns),
    foreign_load: Maybe[Frame] = maybe(foreign_load),
) -> list[Fact]:
    """List what was sampled during steady training."""
    means = sample_means.or_none()
    if means is None:
        return []

    def of(source: str, metric: str, column: str = "mean") -> list[float]:
        chosen = means[(means["source"] == source) & (means["metric"] == metric)].sort_values("rank")
        return [float(v) for v in chosen[column]]

    host, gpu = _Section("Host"), _Section("GPU")
    used = zip(of("host", "cpu_cores"), of("host", "cores"), strict=False)
    host.add("cores in use", [f"{digits(u)} of {n:.0f}" for u, n in used])
    others = foreign_load.or_none()
    if others is not None:
        host.add("cores in use by programs outside the job", _between(others["foreign"].tolist(), ""))
    host.add("cores in use by a rank's process", _between(of("processes", "cpu_cores"), ""))
    if any(of("processes", "children")):
        host.add("cores in use by its children", _between(of("processes", "children_cpu_cores"), ""))
    waited = of("processes", "main_thread_waited_share")
    host.add("main thread ready, but no core free", _between(waited, "share"))
    host.add("largest memory of a rank's process", _between(of("processes", "rss_bytes", "largest"), "bytes"))
    host.add("largest memory in use", _between(of("host", "memory_used_bytes", "largest"), "bytes"))
    gpu.add("a kernel ran", _between(of("gpu", "busy_share"), "share"))
    gpu.add("multiprocessors at work", _between(of("gpu", "sm_busy_share"), "share"))
    gpu.add("tensor cores at work, by its counters", _between(of("gpu", "tensor_busy_share"), "share"))
    gpu.add("largest memory in use", _between(of("gpu", "memory_used_bytes", "largest"), "bytes"))
    gpu.add("clock", _between(of("gpu", "sm_clock_mhz"), "MHz"))
    gpu.add("highest temperature", _between(of("gpu", "temperature_c", "largest"), "°C"))
    power = of("gpu", "mean_power_w") or of("gpu", "power_w")
    gpu.add("power", _between(power, "W"))
    if power:
        step_s = mean_step_ns.get() / 1e9
        gpu.add("energy of a step", _between([watts * step_s for watts in power], "J"))
    return host.facts + gpu.facts


_MARKS = {
    "user": "dlprof.step()",
    "loader": "the loader's next()",
    "optimizer": "the optimizer's step",
    "replay": "a CUDA graph's replay",
    "backward": "the first forward pass after a backward pass",
    "forward": "each forward pass of the outermost module",
}


def _of_recording(
    job: Job = needs(JOB),
    step_means: Maybe[Frame] = maybe(step_means),
    replayed_steps: Maybe[Frame] = maybe(replayed_steps),
) -> list[Fact]:
    section = _Section("Recording")
    section.add("a step begins at", [_MARKS.get(m, m) for m in _several(job, "step", "mark")])
    untraced = settings.not_asked(job)
    states = _several(job, "window", "state")
    section.add("trace window", [state for state in states if state != "not_asked"] or states)
    if untraced:
        section.add("ranks with a trace", f"{len(job.ranks) - len(untraced)} of {len(job.ranks)}, as asked for")
    section.add("steps of the trace by", _several(job, "steps_by"))
    # An nsys without its importer leaves a .qdstrm, which nsys-ui imports.
    places = [f"{hosts}/nsys*{kind}" for hosts in ("hosts/*", "many-hosts/*/*") for kind in (".nsys-rep", ".qdstrm")]
    section.add("for nsys-ui", _files(job, *places))
    means = step_means.or_none()
    if means is not None:
        section.add("steady steps a rank", sorted({int(n) for n in means["steps"]}))
        section.add("traced steps a rank", sorted({int(n) for n in means["traced_steps"]}))
        known = bool((means["steps"] > 1).all())
        noise = duration(float(means["noise_ns"].max())) if known else "not known: it takes two steps or more"
        section.add("standard error of the mean step", noise)
    replays = replayed_steps.or_none()
    if replays is not None and means is not None and (means["source"] == "steps").any():
        name = "traced steps, replayed without the profiler's share"
        section.add(name, [duration(float(ns)) for ns in replays["replay_ns"].head(MOST_RANKS)])
    return section.facts


def _of_clocks(job: Job = needs(JOB), host_clocks: Maybe[Frame] = maybe(host_clocks)) -> list[Fact]:
    """List how far the hosts' clocks are apart, by the ends of collectives, or why waiting is not known."""
    section = _Section("Across ranks")
    if job.world_size < 2:
        return section.facts
    frame = host_clocks.or_none()
    if frame is None:
        if not host_clocks.broke:
            section.add("who waits for whom", f"not known: {host_clocks.why()}")
        return section.facts
    hosts = frame.drop_duplicates("host").reset_index(drop=True)
    if len(hosts) > 1:
        ahead = [f"{row['host']} {duration(row['ahead_ns'])}" for row in hosts.head(MOST_RANKS).to_dict("records")]
        more = [f"and {len(hosts) - MOST_RANKS} more"] if len(hosts) > MOST_RANKS else []
        section.add("hosts' clocks run ahead by (corrected for)", [*ahead, *more])
    if hosts["residual_ns"].notna().any():
        section.add("after that, the ends of one collective differ by", duration(float(hosts["residual_ns"].max())))
    return section.facts


SECTIONS: tuple[Callable[..., list[Fact]], ...] = (
    _of_job,
    _of_device,
    _of_software,
    _of_settings,
    _of_overrides,
    of_throughput,
    _of_step,
    _of_loading,
    _of_precision,
    _of_environment,
    _of_arithmetic,
    _of_memory,
    _of_samples,
    _of_recording,
    _of_clocks,
)
