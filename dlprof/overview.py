"""The run as a whole: what it is, its facts, and what its pictures are made with."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dlprof import run_warnings
from dlprof.engine import Measure, Measured, MeasureFailed
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.arithmetic import arithmetic
from dlprof.measures.loader import before_forward, loader_calls, loader_means
from dlprof.measures.matching import host_clocks
from dlprof.measures.memory import memory_use
from dlprof.measures.operators import tensor_cores
from dlprof.measures.samples import sample_means, sample_series
from dlprof.result import Fact, Panel, RunInfo
from dlprof.timeline.steps import mean_step_ns, step_means, step_series
from dlprof.units import digits, duration, percent, quantity, size

# What the facts and warnings need.
NEEDS: tuple[Measure, ...] = (
    arithmetic,
    host_clocks,
    loader_calls,
    loader_means,
    memory_use,
    sample_means,
    tensor_cores,
    *run_warnings.NEEDS,
)

# The phases of the training thread, and the category in whose colour each is drawn.
PHASES = {"fetch": "input_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer_host"}

# As many ranks as can be told apart in one chart.
MOST_RANKS = 8


@dataclass(frozen=True)
class Picture:
    """One or more panels of the report. `draw` may raise NotMeasured; `needs`: all measures it may ask for."""

    needs: tuple[Measure, ...]
    draw: Callable[[Measured], list[Panel]]


def drawn(run: Measured, pictures: Iterable[Picture]) -> tuple[Panel, ...]:
    """Return the panels of the run, in the order of the pictures, as far as they were recorded."""
    panels: list[Panel] = []
    for picture in pictures:
        with suppress(NotMeasured, MeasureFailed):
            panels += picture.draw(run)
    return tuple(panels)


# What tells when the run began, and its steps.
CLOCK: tuple[Measure, ...] = (sample_series, step_series)


# What lies so far apart was told by clocks that know nothing of each other: a log beside somebody else's traces.
_ANOTHER_CLOCK_NS = 7 * 86_400 * 10**9


def began_ns(run: Measured, own: float) -> int:
    """Return what pictures over the run count from: when the first thing that is drawn over time was.

    `own` is when what the picture shows began; where all the rest lies a week away, it counts from there.
    """
    first = [int(own)]
    for measure, column in ((step_series, "start_ns"), (sample_series, "at_ns")):
        with suppress(NotMeasured, MeasureFailed):
            first.append(int(run.frame(measure)[column].min()))
    return min(at for at in first if abs(at - own) < _ANOTHER_CLOCK_NS)


def step_times(run: Measured) -> pd.Series[float]:
    """Return when each step began on the first rank that did, in ns from the run's beginning, by its number."""
    series = run.frame(step_series)
    return series.groupby("step")["start_ns"].min() - began_ns(run, series["start_ns"].min())


def points(table: pd.DataFrame) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of a panel of lines: the index, then each line's value there, None where there is none."""
    return tuple(
        (int(at), *(None if pd.isna(v) else float(v) for v in values))
        for at, values in zip(table.index, table.to_numpy(), strict=True)
    )


def cells(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with None where a value is missing, and each cell a plain Python value."""
    return table.astype(object).where(table.notna(), None)


def rows(table: pd.DataFrame) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of a panel's table: each cell, None where there is none."""
    return tuple(cells(table).itertuples(index=False, name=None))


def run_info(run: Measured) -> RunInfo:
    """Say which run this is, on what, and how it ended."""
    hosts = run.run.hosts or _several(run, "host")
    return RunInfo(
        path=run.run.path.name or str(run.run.path),
        command=run.run.command,
        world_size=run.world_size,
        ranks=run.ranks,
        missing_ranks=run.missing_ranks[:1024],
        hosts=tuple(hosts),
        device=_device(run),
        torch=_first(_several(run, "versions", "torch")),
        exit=dict(run.run.exit),
        warnings=tuple(run_warnings.warnings(run)),
    )


def _several(run: Measured, *path: str) -> list[str]:
    """Return the distinct values of one fact over the ranks, the recorder's first, then the trace's."""
    values: dict[str, None] = {}
    for r in run.ranks:
        for facts in (run.facts[r], run.trace_facts[r]):
            at: Any = facts
            for key in path:
                at = at.get(key) if isinstance(at, Mapping) else None
            if at not in (None, "", [], {}):
                values[str(at)] = None
                break
    return list(values)


def _first(values: list[str]) -> str:
    return values[0] if values else ""


def _device(run: Measured) -> str:
    names: dict[str, None] = {}
    for r in run.ranks:
        recorded = run.facts[r].get("device") or {}
        listed = run.trace_facts[r].get("devices") or []
        name = recorded.get("name") or (listed[0].get("name") if listed else "")
        if recorded.get("type") == "cpu":
            name = "CPU"
        if name:
            names[str(name)] = None
    return ", ".join(names)


def _loader_facts(run: Measured, add: Any) -> None:
    """Add what the queue and the epochs of the training loader were seen to do, or that there is none."""
    lead = before_forward(run)
    if lead is not None:
        where = "between the optimizer's step and" if _several(run, "step", "mark") == ["optimizer"] else "before"
        share = percent(lead[1] / mean_step_ns(run))
        add("Loading", "none that dlprof knows", f"{duration(lead[1])} of a step ({share}) {where} the first forward")
    try:
        means = run.frame(loader_means)
    except (NotMeasured, MeasureFailed):
        return
    queued = means[(means["empty"] >= 0) & (means["batches"] > 0)]
    if len(queued):
        asked, empty = int(queued["batches"].sum()), int(queued["empty"].sum())
        add("Loading", "queue empty when asked", f"{empty:,} of {asked:,} batches")
        add("Loading", "batches ready when asked", digits(float(queued["ready"].mean())))
    for column, name in (("start_ns", "starting an epoch"), ("first_ns", "first batch"), ("end_ns", "ending an epoch")):
        if means[column].notna().any():
            add("Loading", name, duration(float(means[column].mean())))


def facts(run: Measured) -> tuple[Fact, ...]:
    """List what is known of the job, by section; a fact in which ranks differ shows all its values."""
    out: list[Fact] = []

    def add(section: str, name: str, value: object) -> None:
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        if value not in (None, "", [], ()):
            out.append(Fact(section, name, text[:2000]))

    add("Job", "command", shlex.join(run.run.command) if run.run.command else "")
    add("Job", "folder", Path(run.run.path).name)
    add("Job", "ranks", f"{len(run.ranks)} of {run.world_size}")
    add("Job", "hosts", list(run.run.hosts) or _several(run, "host"))
    add("Job", "backend", _several(run, "backend"))
    code, signal = run.run.exit.get("code"), run.run.exit.get("signal")
    add("Job", "ended", f"by signal {signal}" if signal else f"with exit code {code}" if code is not None else "")
    add("Device", "name", _device(run))
    add("Device", "type", _several(run, "device", "type"))
    add("Device", "memory", [size(float(n)) for n in _several(run, "device", "memory_bytes") if n.isdigit()])
    add("Device", "capability", _several(run, "device", "capability"))
    for key in ("count", "affinity", "quota", "torch_threads"):
        add("Device", f"cpu {key.replace('_', ' ')}", _several(run, "cpu", key))
    for key in ("torch", "cuda", "cudnn", "nccl", "python", "dlprof"):
        add("Software", key, _several(run, "versions", key))
    for section, said in (
        ("Loader", settings.training_loader(run)),
        ("Model", settings.model(run)),
        ("Optimizer", settings.optimizer(run)),
    ):
        for key, value in said.items():
            if isinstance(value, Mapping):
                for name, inner in value.items():
                    add(section, f"{key}.{name}", inner)
            else:
                add(section, str(key).replace("_", " "), value)
    for key in ("schedule", "microbatches", "num_stages"):
        add("Pipeline", key.replace("_", " "), _several(run, "pipeline", key))
    _loader_facts(run, add)
    for key in ("enabled", "dtype"):
        add("Precision", f"autocast {key}", _several(run, "autocast", key))
    add("Precision", "gradient scaler", _several(run, "grad_scaler"))
    for key in ("float32_precision", "allow_tf32", "cudnn_benchmark", "deterministic"):
        add("Precision", key.replace("_", " "), _several(run, "matmul", key))
    for name in sorted({name for r in run.ranks for name in run.facts[r].get("env") or ()}):
        add("Environment", name, _several(run, "env", name))
    _arithmetic_facts(run, add)
    _tensor_facts(run, add)
    _memory_facts(run, add)
    _sample_facts(run, add)
    _recording_facts(run, add)
    _clock_facts(run, add)
    return tuple(out)


def _tensor_facts(run: Measured, add: Any) -> None:
    """List what of its kernels' time each rank multiplies in float32 without tensor cores, in TF32, and on what is not
    known. How busy tensor cores are no kernel's name tells: the samples of the GPU do.
    """
    try:
        frame = run.frame(tensor_cores).sort_values("rank")
    except (NotMeasured, MeasureFailed):
        return
    for name, column in (
        ("kernels' time in float32 products without tensor cores", "float32_ns"),
        ("kernels' time in products in TF32", "tf32_ns"),
        ("kernels' time in products whose unit no name tells", "unknown_ns"),
    ):
        shares = [float(v) for v in frame[column] / frame["kernel_ns"].clip(lower=1)]
        add("Arithmetic", name, _between(shares, "share"))


def _between(values: list[float], unit: str) -> str:
    """Write the values of a few ranks, of many the least and the largest."""
    if len(values) > MOST_RANKS:
        return f"{quantity(min(values), unit)} to {quantity(max(values), unit)}"
    return ", ".join(quantity(v, unit) for v in values)


def _arithmetic_facts(run: Measured, add: Any) -> None:
    try:
        frame = run.frame(arithmetic)
    except NotMeasured as e:
        add("Arithmetic", "not counted", e)
        return
    except MeasureFailed:
        return
    means = frame[["flops", "flops_per_s", "mfu", "backward"]].mean()
    add(
        "Arithmetic", "a step and rank", f"{quantity(means['flops'], 'FLOP')}, {percent(means['backward'])} in backward"
    )
    add("Arithmetic", "achieved a rank", f"{quantity(means['flops_per_s'], 'FLOP')}/s")
    known = frame["mfu"].notna().any()
    add("Arithmetic", "MFU", percent(means["mfu"]) if known else f"not known: {frame['why'].iloc[0]}")
    uncounted = (name for r in run.ranks for name in (run.facts[r].get("flops") or {}).get("uncounted") or ())
    add("Arithmetic", "not in it", [*dict.fromkeys(uncounted)])


def _sample_facts(run: Measured, add: Any) -> None:
    """List what was sampled while training was steady."""
    try:
        means = run.frame(sample_means)
    except (NotMeasured, MeasureFailed):
        return

    def told(source: str, metric: str, column: str = "mean") -> list[float]:
        chosen = means[(means["source"] == source) & (means["metric"] == metric)].sort_values("rank")
        return [float(v) for v in chosen[column]]

    cores = told("host", "cores")
    used = told("host", "cpu_cores")
    add("Host", "cores in use", [f"{digits(u)} of {n:.0f}" for u, n in zip(used, cores, strict=False)])
    add("Host", "cores in use by a rank's process", _between(told("processes", "cpu_cores"), ""))
    if any(told("processes", "children")):
        add("Host", "cores in use by its children", _between(told("processes", "children_cpu_cores"), ""))
    waited = told("processes", "main_thread_waited_share")
    add("Host", "main thread ready, but no core free", _between(waited, "share"))
    add("Host", "largest memory of a rank's process", _between(told("processes", "rss_bytes", "largest"), "bytes"))
    add("Host", "largest memory in use", _between(told("host", "memory_used_bytes", "largest"), "bytes"))
    add("GPU", "a kernel ran", _between(told("gpu", "busy_share"), "share"))
    add("GPU", "multiprocessors at work", _between(told("gpu", "sm_busy_share"), "share"))
    add("GPU", "tensor cores at work, by its counters", _between(told("gpu", "tensor_busy_share"), "share"))
    add("GPU", "largest memory in use", _between(told("gpu", "memory_used_bytes", "largest"), "bytes"))
    add("GPU", "clock", _between(told("gpu", "sm_clock_mhz"), "MHz"))
    add("GPU", "highest temperature", _between(told("gpu", "temperature_c", "largest"), "°C"))
    power = told("gpu", "mean_power_w") or told("gpu", "power_w")
    add("GPU", "power", _between(power, "W"))
    if power:
        step_s = mean_step_ns(run) / 1e9
        add("GPU", "energy of a step", _between([watts * step_s for watts in power], "J"))


def _memory_facts(run: Measured, add: Any) -> None:
    """List the most that PyTorch's allocator took on any rank, and what it had to do for it."""
    snapshots = sorted(run.run.path.glob("ranks/*/memory_snapshot.pickle")) if run.run.recorded else []
    add("Memory", "for pytorch.org/memory_viz", [str(path.relative_to(run.run.path)) for path in snapshots])
    try:
        frame = run.frame(memory_use)
    except (NotMeasured, MeasureFailed):
        return
    total = frame["total_bytes"].min()
    for name, column in (("most allocated", "peak_allocated_bytes"), ("most reserved", "peak_reserved_bytes")):
        most = float(frame[column].max())
        add("Memory", name, size(most) + ("" if pd.isna(total) else f" of {size(total)} ({percent(most / total)})"))
    for name, column in (
        ("allocations retried after emptying the cache", "retries"),
        ("allocations that failed", "ooms"),
        ("allocations from the device in the second half", "late"),
    ):
        most = int(frame[column].max())
        add("Memory", name, f"{most:,}" if most >= 0 else "")


def _clock_facts(run: Measured, add: Any) -> None:
    """Say how far the hosts' clocks are apart, as the ends of collectives show it, or why waiting cannot be told."""
    if run.world_size < 2:
        return
    try:
        frame = run.frame(host_clocks)
    except NotMeasured as e:
        add("Across ranks", "who waits for whom", f"not told: {e}")
        return
    except MeasureFailed:
        return
    hosts = frame.drop_duplicates("host").reset_index(drop=True)
    if len(hosts) > 1:
        ahead = [f"{row['host']} {duration(row['ahead_ns'])}" for row in hosts.head(MOST_RANKS).to_dict("records")]
        more = [f"and {len(hosts) - MOST_RANKS} more"] if len(hosts) > MOST_RANKS else []
        add("Across ranks", "clocks brought together, ahead by", [*ahead, *more])
    if hosts["residual_ns"].notna().any():
        add("Across ranks", "ends of a collective then differ by", duration(float(hosts["residual_ns"].max())))


def _recording_facts(run: Measured, add: Any) -> None:
    marks = {
        "user": "dlprof.step()",
        "loader": "the loader's next()",
        "optimizer": "the optimizer's step",
        "replay": "a CUDA graph's replay",
    }
    add("Recording", "a step begins at", [marks.get(m, m) for m in _several(run, "step", "mark")])
    add("Recording", "trace window", _several(run, "window", "state"))
    # Where nsys came without its importer, nsys-ui does that as it opens the file.
    kinds = (".nsys-rep", ".qdstrm")
    reports = sorted(p for p in run.run.path.glob("hosts/*/nsys*") if p.suffix in kinds) if run.run.recorded else []
    add("Recording", "for nsys-ui", [str(path.relative_to(run.run.path)) for path in reports])
    try:
        means = run.frame(step_means)
    except (NotMeasured, MeasureFailed):
        return
    add("Recording", "steady steps a rank", sorted({int(n) for n in means["steps"]}))
    add("Recording", "traced steps a rank", sorted({int(n) for n in means["traced_steps"]}))
    add("Recording", "standard error of the mean step", duration(float(means["noise_ns"].max())))
