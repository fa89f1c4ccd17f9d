"""The memory of a rank: what PyTorch's allocator uses, whether memory grows, and the parts of the peak by module."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, across_ranks, maybe, needs, per_rank
from dlprof.analysis.machine.samples import sample_means
from dlprof.analysis.timeline.paths import folded, parent
from dlprof.analysis.timeline.steady import ENOUGH, light_steps, standard_error
from dlprof.errors import NotMeasured

MOST_ROWS = 500  # readings of the series that a rank passes on: enough for any screen

# A leak raises the least of the held memory; a cache or a buffer raises only its peaks, and only once. So the readings
# are cut into PARTS parts of equally many steps, each with at least _A_PART readings. The least of each part counts.
# With too few readings (an old job is read less often), the parts have equally many readings.
PARTS, _A_PART = 6, 3
_GOES_ON = 0.5  # the second half of the readings grows by at least this share of the first half's growth
_EACH_PART = 1 / 3  # a leak in every step is even: each part grows by at least this share of the parts' mean growth
_VISIBLE = 0.02  # and by at least this share of the held memory, or the interpreter's bookkeeping would count

# With fewer readings, only large and steady growth counts: the mean growth between readings is this many standard
# errors, the second half grows by this share of the first half's growth, and the memory left is at most so many times
# the growth. A cache that fills, or garbage, slows down or falls back meanwhile.
_STEADY, _EVEN, _SOON = 4.0, 0.75, 10.0

# The sampled metrics of a rank's memory, the better one first: pages mapped from files do not count.
_SAMPLED = {"process": ("anonymous_bytes", "rss_bytes"), "workers": ("children_anonymous_bytes", "children_rss_bytes")}


@per_rank
def memory_use(memory: Frame = needs(schema.MEMORY), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return one row: peak_allocated_bytes, peak_reserved_bytes, kept_bytes, total_bytes (NaN: unknown), retries, ooms
    and late.

    `kept_bytes` is the least that a step left allocated: parameters, optimizer state and other lasting memory.
    `late` counts the allocations from the device in the second half of the readings, when the allocator's cache should
    serve all. Peaks are since the script last reset them, at any reading. −1: not known.
    """
    frame = _readings(memory)
    allocs = frame["device_allocs"].to_numpy()
    halfway = allocs[len(allocs) // 2]
    row = {
        "peak_allocated_bytes": int(frame[["peak_allocated_bytes", "allocated_bytes"]].to_numpy().max()),
        "peak_reserved_bytes": int(frame[["peak_reserved_bytes", "reserved_bytes"]].to_numpy().max()),
        "kept_bytes": int(frame["allocated_bytes"].min()),
        "total_bytes": total_bytes(rank),
        "retries": int(frame["retries"].max()),
        "ooms": int(frame["ooms"].max()),
        "late": int(allocs[-1] - halfway) if halfway >= 0 else -1,
    }
    return pd.DataFrame([row])


@per_rank
def memory_series(memory: Frame = needs(schema.MEMORY)) -> pd.DataFrame:
    """Return the readings in order, thinned: step, allocated_bytes, reserved_bytes."""
    frame = _readings(memory)
    return frame[["step", "allocated_bytes", "reserved_bytes"]].iloc[:: -(-len(frame) // MOST_ROWS)]


@per_rank
def retry_cost(memory: Frame = needs(schema.MEMORY), light_steps: Frame = needs(light_steps)) -> pd.DataFrame:
    """Return one row: the cost of steps in which the allocator had to empty its cache and retry.

    Columns: retries and ooms (failed allocations) while training was steady; retried and plain, the steady steps around
    a reading with a retry since the one before, and the others; ns, how much longer the first last, spread over all
    steady steps, and its standard error noise_ns (NaN: no, or too few, plain steps).
    """
    readings = _readings(memory)
    steps = light_steps[light_steps["steady"]]
    if not len(steps):
        raise NotMeasured("no steady training step was recorded")
    if (readings["retries"] < 0).any():
        raise NotMeasured("this PyTorch does not count what its allocator retries")
    # A reading is of the step that had just ended, so a step belongs to the first reading that is not before it.
    at = np.searchsorted(readings["step"], steps["step"])
    known = at < len(readings)
    at, dur = at[known], steps["length_ns"].to_numpy()[known]
    more, failed = (np.diff(readings[column], prepend=0) for column in ("retries", "ooms"))
    retried, within = more[at] > 0, np.unique(at)
    n, plain = int(retried.sum()), dur[~retried]
    enough = len(plain) >= ENOUGH
    row = {
        "retries": int(more[within].clip(min=0).sum()),
        "ooms": int(failed[within].clip(min=0).sum()),
        "retried": n,
        "plain": len(plain),
        "ns": max(float((dur[retried] - plain.mean()).sum()) / len(dur), 0.0) if enough else nan,
        "noise_ns": np.hypot(standard_error(dur[retried]), standard_error(plain)) * n / len(dur) if enough else nan,
    }
    return pd.DataFrame([row])


@per_rank
def memory_growth(
    light_steps: Frame = needs(light_steps),
    memory: Maybe[Frame] = maybe(schema.MEMORY),
    samples: Maybe[Frame] = maybe(schema.SAMPLES),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return one row for each memory that was read while training was steady: whether it grows, and how fast.

    Columns: what (device: PyTorch's allocator; process; workers: all its children), metric (of the samples, ""
    for the device), grows (1: the floor rises in each part of the time, and goes on), first_bytes and last_bytes (the
    floor of the first and the last part), per_step (bytes), left_bytes (that the device, or the rank's host, had at
    last; NaN: not read here). Raises NotMeasured where too little was read.
    """
    steps = _untouched(light_steps)
    held = []
    if memory:
        mine = _within(memory.get(), steps).rename(columns={"allocated_bytes": "value"})
        held.append(("device", "", mine, total_bytes(rank)))
    if samples:
        read = _within(samples.get(), steps)
        left = float(read.loc[_is(read, "host", "memory_available_bytes"), "value"].tail(_A_PART).min())
        for what, metrics in _SAMPLED.items():
            metric = next((m for m in metrics if (read["metric"] == m).any()), "")
            mine = read[_is(read, "processes", metric)]
            held.append((what, metric, _beyond(mine, samples.get()) if what == "process" else mine, left))
    rows = []
    for what, metric, mine, left in held:
        at, bytes_ = mine["at_ns"], mine["value"]
        enough = len(mine) >= PARTS * _A_PART
        grown = _growth(steps, at, bytes_) if enough else _steep(steps, at, bytes_, left)
        rows += [{"what": what, "metric": metric, **grown, "left_bytes": left}] if grown else []
    if not rows:
        raise NotMeasured(f"fewer than {PARTS * _A_PART} readings of memory while training was steady: record longer")
    frame = pd.DataFrame(rows)
    return frame.assign(left_bytes=frame["left_bytes"] - frame["last_bytes"].where(frame["what"] == "device", 0.0))


# Readings from which it is seen that workers copy more and more, the share of them that may show less, and the share of
# the copies that the second half must have: what an interpreter writes to itself is copied at the start.
_LEAST_COPIED, _FALLS, _STILL = 3, 0.1, 0.2


@per_rank
def copied_memory(
    light_steps: Frame = needs(light_steps), samples: Frame = needs(schema.SAMPLES), rank: RankFacts = needs(RANK)
) -> pd.DataFrame:
    """Return one row: what the rank's loader workers have copied of the memory that they share with it since the fork.

    A fork shares all pages; to read a Python object is to write its count of references, which copies its page. What is
    copied becomes private, and the process is no larger for it: memory that workers make for themselves is left out.

    Columns: workers, copied_bytes (of all, in the time read), per_step, grows (1: throughout), shared_bytes (what they
    may copy yet), left_bytes (on the host, or in the container). Raises NotMeasured where it was read too seldom.
    """
    steps = light_steps[light_steps["kind"] == "train"]
    read = _within(samples, steps)
    own, every, workers = (
        read[_is(read, "processes", f"children{name}")].drop_duplicates("at_ns").set_index("at_ns")["value"]
        for name in ("_private_bytes", "_anonymous_bytes", "")
    )
    both = pd.DataFrame({"own": own, "every": every, "workers": workers}).dropna()
    both = both[both["workers"] == both["workers"].max()]  # while they start and end, there are others
    if len(both) < _LEAST_COPIED:
        raise NotMeasured("what the workers have of memory for themselves was read too seldom")
    copied = (both["own"] - both["every"]).to_numpy(dtype=float)  # the same for what they make for themselves
    each, half = np.diff(copied), len(copied) // 2
    at = np.searchsorted(steps["start_ns"], both.index.to_numpy()[[0, -1]])
    host = samples.loc[_is(samples, "host", "memory_available_bytes"), "value"].tail(_A_PART).min()
    limit = (rank.facts.get("cpu") or {}).get("memory_limit_bytes") or np.inf
    main = samples.loc[_is(samples, "processes", "anonymous_bytes"), "value"].tail(1).sum()
    grown = float(copied[-1] - copied[0])
    row = {
        "workers": int(both["workers"].iloc[-1]),
        "copied_bytes": max(grown, 0.0),
        "per_step": grown / max(int(at[1] - at[0]), 1),
        "grows": int(grown > 0 and (each < 0).mean() <= _FALLS and copied[-1] - copied[half] >= _STILL * grown),
        "shared_bytes": max(-float(copied[-1]), 0.0),
        "left_bytes": float(min(host, max(limit - main - float(both["own"].iloc[-1]), 0.0))),
    }
    return pd.DataFrame([row])


@across_ranks
def memory_ends(memory_growth: Frame = needs(memory_growth), job: Job = needs(JOB)) -> pd.DataFrame:
    """Return the rows of `memory_growth` by shared memory: the ranks of a host share the host's memory.

    `left_bytes` is the smallest reading of the ranks; `steps` is how many steps use it up with all growth in it, NaN
    for memory that does not grow, or where left_bytes is not known.
    """
    frame = memory_growth
    on_device = frame["what"] == "device"
    hosts = frame["rank"].map(lambda rank: settings.host(job, rank))
    memories = [on_device, hosts.where(~on_device, frame["rank"].astype(str))]
    left = frame["left_bytes"].groupby(memories).transform("min")
    growth = (frame["per_step"] * frame["grows"]).groupby(memories).transform("sum")
    steps = left.clip(lower=0.0) / growth.where(frame["grows"] == 1)
    return frame.assign(left_bytes=left, steps=steps)


def _readings(memory: pd.DataFrame) -> pd.DataFrame:
    if not len(memory):
        raise NotMeasured("the CUDA allocator was not sampled: the job ended too early")
    return memory


@across_ranks
def most_memory(
    memory_use: Maybe[Frame] = maybe(memory_use), sample_means: Maybe[Frame] = maybe(sample_means)
) -> float:
    """Return a rank's peak memory on its GPU, else in its process, bytes; raise NotMeasured without either."""
    allocated, means = memory_use.or_none(), sample_means.or_none()
    if allocated is not None and len(allocated):
        return float(allocated["peak_allocated_bytes"].max())
    if means is not None:
        held = means[(means["source"] == "processes") & (means["metric"] == "rss_bytes")]
        if len(held):
            return float(held["largest"].max())
    raise NotMeasured("neither the memory of a GPU nor that of the processes was recorded")


def total_bytes(rank: RankFacts) -> float:
    """Return the memory of the rank's GPU; NaN: it uses none, or unknown."""
    device = rank.facts.get("device") or {}
    total = device.get("memory_bytes") if device.get("type") == "cuda" else None
    return nan if total is None else float(total)


def _is(samples: pd.DataFrame, source: str, metric: str) -> pd.Series[bool]:
    return (samples["source"] == source) & (samples["metric"] == metric)


def _untouched(light_steps: pd.DataFrame) -> pd.DataFrame:
    """Return the steady stretch before or after the profiled steps, the longer one: the profiler's memory grows too."""
    at = np.flatnonzero(light_steps["steady"])
    profiled = np.flatnonzero(light_steps["profiled"])
    if not len(at):
        raise NotMeasured("no steady training step was recorded")
    if len(profiled):
        at = max(at[at > profiled[-1]], at[at < profiled[0]], key=len)
    return light_steps.iloc[at[0] : at[-1] + 1] if len(at) else light_steps.iloc[:0]


def _within(frame: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the readings during the steps."""
    if not len(steps):
        return frame.iloc[:0]
    last = steps.iloc[-1]
    return frame[frame["at_ns"].between(steps["start_ns"].iloc[0], last["start_ns"] + last["dur_ns"])]


def _beyond(mine: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Leave out the first readings, in which a process only refills memory that it held before, as for the profiler.

    An interpreter keeps the memory that it frees. All readings stay if it never refills it, or too few would be left.
    """
    if not len(mine):
        return mine
    first = mine.iloc[0]
    before = samples[_is(samples, first["source"], first["metric"]) & (samples["at_ns"] < first["at_ns"])]["value"]
    reached = np.flatnonzero(mine["value"] >= before.max())
    left = mine.iloc[reached[0] :] if len(reached) else mine
    return left if len(left) >= PARTS * _A_PART else mine


def _growth(steps: pd.DataFrame, at_ns: pd.Series[int], held_bytes: pd.Series[float]) -> dict[str, float]:
    """Return the figures of a row of `memory_growth`."""
    at, held = np.searchsorted(steps["start_ns"], at_ns), held_bytes.to_numpy(dtype=float)
    parts = np.split(np.arange(len(at)), np.searchsorted(at, np.linspace(at[0], at[-1], PARTS + 1)[1:-1]))
    if min(map(len, parts)) < _A_PART:
        parts = np.array_split(np.arange(len(at)), PARTS)
    lowest = np.array([part[np.argmin(held[part])] for part in parts])
    floor, half = held[lowest], PARTS // 2
    early, late = floor[half] - floor[0], floor[-1] - floor[half - 1]
    grown, passed = float(floor[-1] - floor[0]), int(at[lowest[-1]] - at[lowest[0]])
    evenly = bool((np.diff(floor) > _EACH_PART * grown / (PARTS - 1)).all())
    return {
        "grows": int(evenly and late >= _GOES_ON * early and passed > 0 and grown > _VISIBLE * floor[0]),
        "first_bytes": float(floor[0]),
        "last_bytes": float(floor[-1]),
        "per_step": grown / passed if passed else 0.0,
    }


def _steep(
    steps: pd.DataFrame, at_ns: pd.Series[int], held_bytes: pd.Series[float], left_bytes: float
) -> dict[str, float] | None:
    """Return the same from few readings, if the held memory grows much and steadily; None: they do not show it."""
    at, held = np.searchsorted(steps["start_ns"], at_ns), held_bytes.to_numpy(dtype=float)
    each: NDArray[np.float64] = np.diff(held)
    half = len(each) // 2
    if half < 2 or at[-1] <= at[0]:
        return None
    grown, early, late = float(held[-1] - held[0]), each[:half].mean(), each[-half:].mean()
    steady = each.mean() >= _STEADY * standard_error(each) and late >= _EVEN * early
    if not steady or grown <= max(_VISIBLE * held[0], left_bytes / _SOON) or np.isnan(left_bytes):
        return None
    first, last = float(held[0]), float(held[-1])
    return {"grows": 1, "first_bytes": first, "last_bytes": last, "per_step": grown / float(at[-1] - at[0])}


# The parts that are counted tensor by tensor. They exist all the time or at one of the moments below.
COUNTED = ("parameter", "cast", "gradient", "optimizer", "buffer", "activation", "input", "communication")

# The most rows that a rank passes on: the largest modules, and one row for all others.
MOST_MODULE_ROWS = 1_000

_KEYS = ["module", "kind", "part", "device"]


@per_rank
def memory_composition(
    held: Frame = needs(schema.HELD),
    memory_use: Maybe[Frame] = maybe(memory_use),
    memory: Maybe[Frame] = maybe(schema.MEMORY),
    samples: Maybe[Frame] = maybe(schema.SAMPLES),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the parts of each device's memory at its peak: device, part, bytes, known (the source), moment.

    The rows of a device add up to all memory that the process has there. Parts, with their source in brackets:
    those of COUNTED ("counted", in one step), at the `moment` with more of them: "backward" (a backward pass begins) or
    "gradients" (the last one has ended). On a GPU also temporary (the allocator's peak less the counted parts,
    "difference"), cache (reserved and not allocated at the peaks, "allocator"), and libraries (the CUDA context, NCCL
    and other processes on that GPU: used less reserved, "driver"). On the host, where nothing counts what PyTorch
    allocates: process (memory of the process once it had imported torch, "process"), and unexplained (the rest of its
    peak: data, temporaries, freed memory that it keeps, "difference"). On a GPU the difference is "unexplained" where
    activations were not counted, or where it is below 0: more was counted than allocated.
    """
    facts = rank.trace_facts.get("held") or {}
    if not len(held):
        raise NotMeasured(_why(facts))
    rows: list[tuple[str, str, float, str, str]] = []
    for device, mine in held.groupby("device", observed=True):
        moment, parts = _fullest(mine, facts, str(device))
        rows += [(str(device), part, size, "counted", moment) for part, size in parts.items()]
        counted = sum(parts.values())
        if device == "cpu":
            rows += [("cpu", *row, moment) for row in _of_process(facts, counted)]
        elif memory_use and memory and _index(str(device)) == int(memory.get()["device"].iloc[-1]):
            known = (facts.get("activations") or {}).get("state") == "counted"
            found = _of_gpu(memory_use.get(), memory.get(), samples, counted, "temporary" if known else "unexplained")
            rows += [(str(device), *row, moment) for row in found]
    frame = pd.DataFrame(rows, columns=["device", "part", "bytes", "known", "moment"])
    return frame[frame["bytes"] != 0].reset_index(drop=True)


@per_rank
def held_by_module(held: Frame = needs(schema.HELD), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return the memory of each module without the modules inside it, the largest first.

    Columns: module (path), kind (class), part, device, tensors, bytes and full_bytes (before sharding). Beyond
    MOST_MODULE_ROWS rows the smaller ones are one row for each part and device, with module "…".
    """
    if not len(held):
        raise NotMeasured(_why(rank.trace_facts.get("held") or {}))
    sums = ["tensors", "bytes", "full_bytes"]
    whole = held.astype(dict.fromkeys(sums, "float64"))  # implausible numbers in the input may overflow 64 bits
    frame = whole.groupby(_KEYS, observed=True, as_index=False)[sums].sum()
    frame = frame.astype(dict.fromkeys(_KEYS, object)).sort_values("bytes", ascending=False, kind="stable")
    rest = frame[MOST_MODULE_ROWS:].assign(module="…", kind="").groupby(_KEYS, as_index=False)[sums].sum()
    return pd.concat([frame[:MOST_MODULE_ROWS], rest], ignore_index=True)


@per_rank
def held_names(held: Frame = needs(schema.HELD), modules: Maybe[Frame] = maybe(schema.MODULES)) -> pd.DataFrame:
    """Return each module that holds memory, and the modules around it: module (path), name (folded) and kind.

    Modules fold by their content, as in the tree of the step's time: the first layer of a stack may hold less than the
    others if nothing before it is trained. Without a trace they fold by the modules that hold memory.
    """
    known = [held[["module", "kind"]]]
    if modules:
        known.insert(0, modules.get()[["path", "kind"]].rename(columns={"path": "module"}))
    rows = pd.concat([frame.astype(str) for frame in known]).drop_duplicates("module")
    kinds = dict(zip(rows["module"], rows["kind"], strict=True))
    mine = dict.fromkeys(path for module in held["module"].astype(str).unique() for path in around(module))
    names = folded({**dict.fromkeys(mine, ""), **kinds})
    return pd.DataFrame(
        {"module": list(mine), "name": [names[p] for p in mine], "kind": [kinds.get(p, "") for p in mine]}
    )


def around(path: str) -> list[str]:
    """Return a module's path and those of all modules around it; of the model itself, its own."""
    found = [path]
    while path := parent(path):
        found.append(path)
    return found


def _why(facts: Mapping[str, Any]) -> str:
    return f"memory was not counted: {facts.get('state') or 'no tensor was seen'}"


def _fullest(mine: pd.DataFrame, facts: Mapping[str, Any], device: str) -> tuple[str, dict[str, float]]:
    """Return the moment with the most counted memory on a device, and each part's bytes at that moment.

    When a backward pass begins, all activations exist, and the gradients that were not set to None. When it has ended,
    all gradients exist, and neither activations nor autocast's copies.
    """
    sums = mine.groupby("part", observed=True)["bytes"].agg(lambda sizes: float(sizes.astype(float).sum()))
    whole = {part: float(sums.get(part, 0.0)) for part in COUNTED}
    there = 0.0
    for moment in facts.get("moments") or ():
        if (moment.get("device"), moment.get("moment")) == (device, "backward"):
            there = float(moment.get("gradient_bytes") or 0)
    found = {"backward": whole | {"gradient": there}, "gradients": whole | {"activation": 0.0, "cast": 0.0}}
    fullest = max(found, key=lambda moment: sum(found[moment].values()))
    return fullest, found[fullest]


def _of_gpu(
    use: pd.DataFrame, memory: pd.DataFrame, samples: Maybe[pd.DataFrame], counted: float, rest: str
) -> list[tuple[str, float, str]]:
    peak, reserved = float(use["peak_allocated_bytes"].iloc[0]), float(use["peak_reserved_bytes"].iloc[0])
    rows = [
        (rest, max(peak - counted, 0.0), "difference"),
        ("unexplained", min(peak - counted, 0.0), "difference"),
        ("cache", max(reserved - peak, 0.0), "allocator"),
    ]
    beyond = _beyond_allocator(memory, samples)
    return rows if np.isnan(beyond) else [*rows, ("libraries", beyond, "driver")]


def _beyond_allocator(memory: pd.DataFrame, samples: Maybe[pd.DataFrame]) -> float:
    """Return the used memory according to the driver less the reserved, the median of all readings; NaN: unknown."""
    read = samples.or_none()
    if read is None:
        return nan
    used = read[(read["source"] == "gpu") & (read["metric"] == "memory_used_bytes")]
    at = np.searchsorted(memory["at_ns"], used["at_ns"], side="right") - 1
    if not (at >= 0).any():
        return nan
    beyond = used["value"].to_numpy()[at >= 0] - memory["reserved_bytes"].to_numpy()[at[at >= 0]]
    return max(float(np.median(beyond)), 0.0)


def _of_process(facts: Mapping[str, Any], counted: float) -> list[tuple[str, float, str]]:
    of_process = facts.get("process") or {}
    before, most = (of_process.get(name) for name in ("before_bytes", "anonymous_bytes"))
    if before is None or most is None:
        return []
    return [("process", float(before), "process"), ("unexplained", float(most) - before - counted, "difference")]


def _index(device: str) -> int:
    """Return the number in "cuda:0"; −1: it has none."""
    number = device.partition(":")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else -1
