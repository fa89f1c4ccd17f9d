"""The figures of a result that are no outcome of a rule: each made from measures, as structs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import pandas as pd

from dlprof.analysis.communication.bandwidth import exchanged, size_class
from dlprof.analysis.communication.blame import blame
from dlprof.analysis.compute.kernels import kinds_of_work
from dlprof.analysis.compute.operators import work_means
from dlprof.analysis.compute.peaks import arithmetic
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.host.parts import ALL, BETWEEN, LAUNCHES, LOOP, OPTIMIZER, WAITS, host_parts
from dlprof.analysis.host.profiles import profile_summaries
from dlprof.analysis.host.queue import device_lag
from dlprof.analysis.host.stacks import line_times
from dlprof.analysis.machine.gpus import gpu_uses
from dlprof.analysis.machine.samples import foreign_load
from dlprof.analysis.memory.changes import memory_footprint
from dlprof.analysis.memory.memory import most_memory
from dlprof.analysis.memory.snapshot import memory_holders, memory_peak
from dlprof.analysis.modules.tree import FLAGS, module_means
from dlprof.analysis.modules.work import OUTSIDE, module_naming
from dlprof.analysis.panel import cells
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.savings import lengths_ns, spread
from dlprof.analysis.step.throughput import scaling, throughput
from dlprof.analysis.step.whole_job import run_parts
from dlprof.analysis.stragglers.late_ranks import members_of
from dlprof.analysis.timeline.device import device_time
from dlprof.analysis.timeline.steps import mean_step_ns, phases_of_step, step_means
from dlprof.result import (
    CATEGORIES,
    MOST_RANKS,
    QUANTILES,
    Blame,
    DeviceTime,
    Exchange,
    ForeignLoad,
    HostLimited,
    HostPart,
    Loop,
    MemoryPeak,
    RankStep,
    RunPart,
    TimePart,
    Window,
    Work,
)
from dlprof.result.figures import DeviceWork, Footprint, GpuLog, Module, Modules, Outside, Profile, Throughput
from dlprof.result.scale import Scaling

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


def device_of(device_time: Maybe[Frame] = maybe(device_time)) -> tuple[DeviceTime, ...]:
    """Return the partition of each rank's device span."""
    return _structs(DeviceTime, device_time.or_none())


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


def work_of(work_means: Maybe[Frame] = maybe(work_means)) -> tuple[Work, ...]:
    """Return the heaviest operators and kernels."""
    return _structs(Work, work_means.or_none())


def device_work_of(kinds_of_work: Maybe[DeviceWork] = maybe(kinds_of_work)) -> DeviceWork | None:
    """Return where the device's own time goes; None: no kernel was traced."""
    return kinds_of_work.or_none()


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


def scaling_of(scaling: Maybe[Scaling] = maybe(scaling)) -> Scaling | None:
    """Return what tells how the job scales; None: it has one rank."""
    return scaling.or_none()


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


def footprint_of(memory_footprint: Maybe[Footprint] = maybe(memory_footprint)) -> Footprint | None:
    """Return what memory is made of; None: it was not counted."""
    return memory_footprint.or_none()


# Each field of a result that is made here.
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


def budget_of(run_parts: Maybe[Frame] = maybe(run_parts)) -> tuple[RunPart, ...]:
    """Return the parts of the whole run; () where its beginning and end are not known."""
    return _structs(RunPart, run_parts.or_none())


FIELDS: Mapping[str, Callable[..., Any]] = {
    "window": window_of,
    "device": device_of,
    "time": time_of,
    "blame": blame_of,
    "steps": steps_of,
    "work": work_of,
    "exchanges": exchanges_of,
    "foreign_load": foreign_load_of,
    "memory": memory_of,
    "profiles": profiles_of,
    "gpu_logs": gpu_logs_of,
    "scaling": scaling_of,
    "footprint": footprint_of,
    "members": members_of,
    "modules": modules_of,
    "host_limited": host_limited_of,
    "device_work": device_work_of,
    "budget": budget_of,
}
