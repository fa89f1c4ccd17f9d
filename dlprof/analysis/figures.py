"""What a result holds besides the outcomes of rules: its figures, what the run is, and the facts of it.

Each is made from measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pandas as pd
from msgspec import Struct, field

from dlprof import schema
from dlprof.analysis import settings
from dlprof.analysis.communication.bandwidth import exchanged, size_class
from dlprof.analysis.communication.blame import blame
from dlprof.analysis.communication.collectives import host_clocks
from dlprof.analysis.compute.kernels import kinds_of_work
from dlprof.analysis.compute.operators import tensor_cores, work_means
from dlprof.analysis.compute.peaks import arithmetic
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, Measure, Measured, maybe, needs, per_rank
from dlprof.analysis.host.parts import ALL, BETWEEN, LAUNCHES, LOOP, OPTIMIZER, WAITS, host_parts
from dlprof.analysis.host.stacks import DOING, line_times, profile_summaries
from dlprof.analysis.host.waiting import device_lag
from dlprof.analysis.input.loader import before_forward, loader_means
from dlprof.analysis.machine.gpus import gpu_uses
from dlprof.analysis.machine.samples import foreign_load, sample_means
from dlprof.analysis.memory.changes import memory_footprint
from dlprof.analysis.memory.memory import memory_use, most_memory
from dlprof.analysis.memory.snapshot import memory_holders, memory_peak
from dlprof.analysis.modules.tree import FLAGS, module_means
from dlprof.analysis.modules.work import OUTSIDE, module_naming
from dlprof.analysis.panel import MOST_RANKS as MOST_LISTED
from dlprof.analysis.panel import cells
from dlprof.analysis.source.line_work import lines_of_work
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.savings import lengths_ns, spread
from dlprof.analysis.step.throughput import of_throughput, scaling, throughput
from dlprof.analysis.step.whole_job import run_parts
from dlprof.analysis.stragglers.late_ranks import members_of
from dlprof.analysis.timeline.device import device_time
from dlprof.analysis.timeline.steps import mean_step_ns, phases_of_step, step_means
from dlprof.analysis.timeline.what_if import replayed_steps
from dlprof.errors import NotMeasured
from dlprof.overrides import Outcome, described
from dlprof.plain import command_line
from dlprof.result import (
    CATEGORIES,
    MOST_RANKS,
    QUANTILES,
    Blame,
    DeviceTime,
    Exchange,
    Fact,
    ForeignLoad,
    HostLimited,
    HostPart,
    Loop,
    MemoryPeak,
    RankStep,
    RunInfo,
    RunPart,
    TimePart,
    Window,
    Work,
)
from dlprof.result.figures import GpuLog, LineWork, Module, Modules, Outside, Profile, Throughput
from dlprof.units import digits, duration, percent, quantity, size

T = TypeVar("T")


def _structs(kind: type[T], frame: pd.DataFrame | None) -> tuple[T, ...]:
    """Return a frame's rows as structs with the fields that are named as its columns, NaN as None; none of None."""
    return () if frame is None else msgspec.convert(cells(frame).to_dict("records"), tuple[kind, ...])  # type: ignore[valid-type]


def window_of(
    step_means: Maybe[Frame] = maybe(step_means),
    mean_step_ns: Maybe[float] = maybe(mean_step_ns),
    spread: Maybe[Frame] = maybe(spread),
    device_lag: Maybe[Frame] = maybe(device_lag),
    arithmetic: Maybe[Frame] = maybe(arithmetic),
    phases_of_step: Maybe[Frame] = maybe(phases_of_step),
    throughput: Maybe[Throughput] = maybe(throughput),
    most_memory: Maybe[float] = maybe(most_memory),
    lengths_ns: Maybe[tuple[float, ...]] = maybe(lengths_ns),
    job: Job = needs(JOB),
) -> Window | None:
    """Return the steps that the figures are of; None where no step is known."""
    means = step_means.or_none()
    if means is None:
        return None
    overhead, lag = means["overhead"].mean(), device_lag.or_none()
    computed = arithmetic.or_none()
    figures = {} if computed is None else computed[["flops", "mfu"]].mean().dropna().to_dict()
    return Window(
        steps=int(means["steps"].min()),
        source="steps" if (means["source"] == "steps").all() else "trace",
        step_ns=mean_step_ns.get(),
        overhead=None if pd.isna(overhead) else float(overhead),
        unit="step" if (means["unit"] == "step").all() else "trace",
        traced_steps=int(means["traced_steps"].min()),
        noise_ns=_noise(spread.or_none()),
        lag_ns=None if lag is None else float(lag["lag_ns"].mean()),
        micro_batches=1 if phases_of_step.or_none() is None else int(phases_of_step.get()["micro_batches"].max()),
        throughput=throughput.or_none(),
        memory_bytes=most_memory.or_none(),
        lengths_ns=lengths_ns.or_none() or (),
        loop=_loop(job),
        **{str(name): float(value) for name, value in figures.items()},
    )


def _loop(job: Job) -> Loop | None:
    """Return the loop that recurs in all ranks' traces, where it is the same."""
    each = [job.trace_facts[rank].get("loop") for rank in job.ranks]
    loops = [one for one in each if one]
    if not loops or len(loops) < len(each) or len({one["kernels"] for one in loops}) > 1:
        return None
    means = {name: sum(one[name] for one in loops) / len(loops) for name in ("period_ns", "median_ns", "noise_ns")}
    return Loop(kernels=int(loops[0]["kernels"]), often=min(int(one["often"]) for one in loops), **means)


def _noise(spread: pd.DataFrame | None) -> float | None:
    """Return the standard error of the run's mean step, ns.

    Ranks wait for each other, so their errors are not independent: many ranks do not make it smaller.
    """
    if spread is None or spread["noise_ns"].isna().any():
        return None
    return float(spread["noise_ns"].mean())


def _rows(kind: type[T], measure: Measure[pd.DataFrame]) -> Callable[..., tuple[T, ...]]:
    """Return what makes a field of the rows of a measure."""

    def made(frame: Maybe[Frame] = maybe(measure)) -> tuple[T, ...]:
        return _structs(kind, frame.or_none())

    return made


def _value(measure: Measure[T]) -> Callable[..., T | None]:
    """Return what makes a field that is a measure itself; None: not known."""

    def made(value: Maybe[T] = maybe(measure)) -> T | None:
        return value.or_none()

    return made


def time_of(breakdown: Maybe[Frame] = maybe(breakdown)) -> tuple[TimePart, ...]:
    """Return the parts of each rank's mean steady step, in the order of CATEGORIES."""
    frame = breakdown.or_none()
    if frame is None:
        return ()
    share = frame["ns"] / frame.groupby("rank")["ns"].transform("sum")
    place = frame["category"].map({c: i for i, c in enumerate(CATEGORIES)})
    return _structs(TimePart, frame.assign(share=share, place=place).sort_values(["rank", "place"]))


def steps_of(spread: Maybe[Frame] = maybe(spread)) -> tuple[RankStep, ...]:
    """Return each rank's steady steps."""
    frame = spread.or_none()
    if frame is None:
        return ()
    quantiles = frame[[f"q{i}" for i in range(len(QUANTILES))]].to_numpy().tolist()
    return _structs(RankStep, frame.assign(quantiles_ns=pd.Series(quantiles, frame.index)))


def exchanges_of(exchanged: Maybe[Frame] = maybe(exchanged)) -> tuple[Exchange, ...]:
    """Return the collectives by kind, ranks and class of size."""
    frame = exchanged.or_none()
    return _structs(Exchange, None if frame is None else frame.assign(size=frame["size"].map(size_class)))


def foreign_load_of(foreign_load: Maybe[Frame] = maybe(foreign_load)) -> ForeignLoad | None:
    """Return what programs outside the job used of a host's cores; None: unknown."""
    frame = foreign_load.or_none()
    if frame is None:
        return None
    return _structs(ForeignLoad, frame.head(1).assign(disturbs=frame["disturbs"].astype(bool)))[0]


def memory_of(
    memory_peak: Maybe[Frame] = maybe(memory_peak), memory_holders: Maybe[Frame] = maybe(memory_holders)
) -> tuple[MemoryPeak, ...]:
    """Return the most that tensors held on each rank's device, the largest first."""
    peaks, holders = memory_peak.or_none(), memory_holders.or_none()
    if peaks is None or holders is None:
        return ()
    by = ["rank", "device"]
    top = holders[holders["moment"] == "peak"].drop_duplicates(by).rename(columns={"bytes": "site_bytes"})
    frame = peaks.rename(columns={"peak_bytes": "bytes"}).assign(whole=peaks["events"] > 0)
    frame = frame.merge(top[[*by, "site", "site_bytes"]], on=by, how="left").fillna({"site": "", "site_bytes": 0.0})
    frame = frame.sort_values("bytes", ascending=False, kind="stable").drop_duplicates("rank").head(MOST_RANKS)
    return _structs(MemoryPeak, frame.astype({"bytes": float, "reserved_bytes": float, "site_bytes": float}))


def profiles_of(
    profile_summaries: Maybe[Frame] = maybe(profile_summaries),
    line_times: Maybe[Frame] = maybe(line_times),
    job: Job = needs(JOB),
) -> tuple[Profile, ...]:
    """Return what the profiles of other tools show."""
    found = _structs(Profile, profile_summaries.or_none())
    lines = line_times.or_none()
    names = [
        n.removeprefix("profile ") for of in job.trace_facts.values() for n, facts in of.items() if _of_lines(facts)
    ]
    if lines is None or not names:
        return found
    # What a function calls that is profiled as well counts in both: the share is of the longest function's own.
    hottest = lines.loc[[lines["dur_ns"].idxmax()]].iloc[0]
    whole = float(lines.groupby(["function", "file"])["dur_ns"].sum().max())
    place = (str(hottest["function"]), str(hottest["file"]), int(hottest["line"]))
    share = float(hottest["dur_ns"]) / whole if whole else 0.0
    return (*found, Profile(names[0], "line_profiler", "ns", whole, *place, share=share, own=True, counted=True))


def _of_lines(facts: object) -> bool:
    return isinstance(facts, dict) and facts.get("tool") == "line_profiler"


def gpu_logs_of(gpu_uses: Maybe[Frame] = maybe(gpu_uses)) -> tuple[GpuLog, ...]:
    """Return what logs say of each GPU."""
    frame = gpu_uses.or_none()
    return _structs(GpuLog, None if frame is None else frame.rename(columns={"source": "gpu"}))


def blame_of(blame: Maybe[Frame] = maybe(blame), mean_step_ns: Maybe[float] = maybe(mean_step_ns)) -> tuple[Blame, ...]:
    """Return for whom each rank's communication waits."""
    frame, step = blame.or_none(), mean_step_ns.or_none()
    return _structs(Blame, None if frame is None or step is None else frame.assign(share=frame["ns"] / step))


def modules_of(
    module_means: Maybe[Frame] = maybe(module_means), module_naming: Maybe[Frame] = maybe(module_naming)
) -> Modules | None:
    """Return the tree of the model's modules, or why none is known."""
    frame = module_means.or_none()
    if frame is None:
        return None if module_means.broke else Modules(why=module_means.why())
    outside, naming = frame["path"] == OUTSIDE, module_naming.or_none()
    return Modules(
        on_device=bool(frame["on_device"].iloc[0]),
        total_ns=float(frame["total_ns"].iloc[0]),
        rows=_structs(Module, frame[~outside].astype(dict.fromkeys(FLAGS, bool))),
        outside=_structs(Outside, frame[outside & (frame["ns"] > 0)].rename(columns={"kind": "part"})),
        ranks=int(frame["ranks"].iloc[0]),
        naming_ns=None if naming is None else float(naming["ns"].mean()),
    )


_RULE_OF = {
    LOOP: "parameter_loop",
    WAITS: "host_sync",
    OPTIMIZER: "unfused_optimizer",
    BETWEEN: "step_python",
    LAUNCHES: "host_bound",
}


def host_limited_of(host_parts: Maybe[Frame] = maybe(host_parts)) -> HostLimited | None:
    """Return how the device waits for its host, on the rank that gains most without; None where it is not known."""
    frame = host_parts.or_none()
    if frame is None or frame.empty:
        return None
    whole = frame[frame["part"] == ALL].sort_values("gain_ns", ascending=False).iloc[0]
    mine = frame[(frame["rank"] == whole["rank"]) & (frame["part"] != ALL)].sort_values("gain_ns", ascending=False)
    parts = [
        HostPart(
            str(row["part"]), _RULE_OF[row["part"]], float(row["host_ns"]), float(row["gain_ns"]), str(row["names"])
        )
        for row in mine.to_dict("records")
    ]
    return HostLimited(int(whole["rank"]), float(whole["gain_ns"]), tuple(parts))


# Each field of a result that is made here.
FIELDS: Mapping[str, Callable[..., Any]] = {
    "window": window_of,
    "device": _rows(DeviceTime, device_time),  # the partition of each rank's device span
    "time": time_of,
    "blame": blame_of,
    "steps": steps_of,
    "work": _rows(Work, work_means),  # the heaviest operators and kernels
    "exchanges": exchanges_of,
    "foreign_load": foreign_load_of,
    "memory": memory_of,
    "profiles": profiles_of,
    "gpu_logs": gpu_logs_of,
    "scaling": _value(scaling),  # None: it has one rank
    "footprint": _value(memory_footprint),  # None: it was not counted
    "members": members_of,
    "modules": modules_of,
    "host_limited": host_limited_of,
    "device_work": _value(kinds_of_work),  # None: no kernel was traced
    "lines": _rows(LineWork, lines_of_work),  # (): no step's operators were counted by line
    "budget": _rows(RunPart, run_parts),  # (): the run's beginning and end are not known
}


class _Section(Struct, frozen=True):
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
    """List what runs, on which devices, with what software, and the settings of loader, model and optimizer."""
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
    device = _Section("Device")
    device.add("name", _device(job))
    device.add("type", _several(job, "device", "type"))
    device.add("memory", [size(float(n)) for n in _several(job, "device", "memory_bytes") if n.isdigit()])
    device.add("capability", [c.replace(", ", ".") for c in _several(job, "device", "capability")])
    for key in ("count", "affinity", "quota", "torch_threads", "units"):
        device.add(f"cpu {key.replace('_', ' ')}", _several(job, "cpu", key))
    software = _Section("Software")
    for key in ("torch", "cuda", "cudnn", "nccl", "python", "dlprof"):
        software.add(key, _several(job, "versions", key))
    return section.facts + device.facts + software.facts + _of_settings(job)


# Facts of a loader and a model that are not settings.
_OF_RANK = ("replica", "reads_sequences")


def _of_settings(job: Job) -> list[Fact]:
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


def _of_precision_and_environment(job: Job = needs(JOB)) -> list[Fact]:
    section = _Section("Precision")
    for key in ("enabled", "dtype"):
        section.add(f"autocast {key}", _several(job, "autocast", key))
    section.add("gradient scaler", _several(job, "grad_scaler"))
    for key in ("float32_precision", "allow_tf32", "cudnn_benchmark", "cudnn_deterministic", "deterministic"):
        section.add(key.replace("_", " "), _several(job, "matmul", key))
    environment = _Section("Environment")
    for name in sorted({name for r in job.ranks for name in job.facts[r].get("env") or ()}):
        environment.add(name, _several(job, "env", name))
    return section.facts + environment.facts


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
    if len(values) > MOST_LISTED:
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
    untraced = settings.untraced_by_choice(job)
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
        section.add(name, [duration(float(ns)) for ns in replays["replay_ns"].head(MOST_LISTED)])
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
        ahead = [f"{row['host']} {duration(row['ahead_ns'])}" for row in hosts.head(MOST_LISTED).to_dict("records")]
        more = [f"and {len(hosts) - MOST_LISTED} more"] if len(hosts) > MOST_LISTED else []
        section.add("hosts' clocks run ahead by (corrected for)", [*ahead, *more])
    if hosts["residual_ns"].notna().any():
        section.add("after that, the ends of one collective differ by", duration(float(hosts["residual_ns"].max())))
    return section.facts


SECTIONS: tuple[Callable[..., list[Fact]], ...] = (
    _of_job,
    _of_overrides,
    of_throughput,
    _of_step,
    _of_loading,
    _of_precision_and_environment,
    _of_arithmetic,
    _of_memory,
    _of_samples,
    _of_recording,
    _of_clocks,
)
