"""The memory that PyTorch's allocator uses on the device, and whether memory grows.

The state of PyTorch's allocator: how much is free, in which blocks, and why a request failed.
"""

from __future__ import annotations

from math import nan

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, across_ranks, maybe, needs, per_rank
from dlprof.analysis.machine.samples import sample_means
from dlprof.analysis.memory.snapshot import Replay, memory_replay, shortened
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


Ints = NDArray[np.int64]


@per_rank
def memory_state(
    memory_blocks: Frame = needs(schema.MEMORY_BLOCKS), memory_replay: list[Replay] = needs(memory_replay)
) -> pd.DataFrame:
    """Return the allocator's state when the snapshot was taken ("end"), and at the last failed request ("oom").

    Columns: device, moment, allocated_bytes, reserved_bytes, free_bytes (reserved and not allocated), split_bytes (free
    in segments that are partly in use, which cannot be returned to the device), largest_bytes (the largest free block;
    for an oom, of the requesting stream and pool), requested_bytes, device_free_bytes, ooms (so far), site (of the
    request), at_ns. NaN: not known, or no request.
    """
    rows = []
    for r in memory_replay:
        mine = memory_blocks[memory_blocks["device"] == r.device]
        end = _end(mine)
        if end is not None:
            rows.append((r.device, "end", *end, nan, nan, len(r.ooms), "", int(r.at_ns[-1])))
        if len(r.ooms):
            request = r.ooms.iloc[-1]
            moment = int(request["moment"]) - 1  # before it failed
            free = float(request["free_bytes"])
            rows.append(
                (
                    r.device,
                    "oom",
                    int(r.allocated[moment]),
                    int(r.reserved[moment]),
                    *_at(r, moment, int(request["stream"]), str(request["pool"])),
                    float(request["bytes"]),
                    free if free >= 0 else nan,
                    len(r.ooms),
                    shortened([str(request["site"])])[str(request["site"])],
                    int(r.at_ns[moment + 1]),
                )
            )
    if not rows:
        raise NotMeasured("the snapshot shows no memory of a GPU")
    columns = ["device", "moment", "allocated_bytes", "reserved_bytes", "free_bytes", "split_bytes", "largest_bytes"]
    return pd.DataFrame(rows, columns=[*columns, "requested_bytes", "device_free_bytes", "ooms", "site", "at_ns"])


def _end(blocks: pd.DataFrame) -> tuple[float, ...] | None:
    """Return allocated, reserved, free, split and largest free bytes of the blocks themselves; None without any."""
    if not len(blocks):
        return None
    free = blocks["state"] == "inactive"
    reserved = float(blocks.drop_duplicates("segment")["segment_bytes"].sum())
    used = blocks.loc[~free, "segment"].unique()
    split = float(blocks.loc[free & blocks["segment"].isin(used), "bytes"].sum())
    unused = float(blocks.loc[free, "bytes"].sum())
    return reserved - unused, reserved, unused, split, float(blocks.loc[free, "bytes"].max()) if free.any() else 0.0


def _at(r: Replay, moment: int, stream: int, pool: str) -> tuple[float, float, float]:
    """Return free, split and largest free bytes at a moment, the last one of a stream and pool; NaN: not known."""
    free = float(r.reserved[moment] - r.allocated[moment])
    segments = r.segments[(r.segments["begins"] <= moment) & (moment < r.segments["ends"])]
    if not len(segments) or abs(float(segments["bytes"].sum()) - float(r.reserved[moment])) > 0:
        return free, nan, nan  # expandable segments are not followed
    live = r.live(moment)
    pieces, within, whole = gaps(
        segments["address"].to_numpy(), segments["bytes"].to_numpy(), r.address[live], r.held[live]
    )
    order = np.argsort(segments["address"].to_numpy(), kind="stable")
    mine = ((segments["stream"] == stream) & (segments["pool"].astype(str) == pool)).to_numpy()[order]
    largest = float(pieces[mine[within]].max(initial=0))
    return free, float(pieces[~whole].sum()), largest


def gaps(segments: Ints, sizes: Ints, blocks: Ints, held: Ints) -> tuple[Ints, NDArray[np.intp], NDArray[np.bool_]]:
    """Return the free pieces between blocks: bytes, which segment (in order of address), whether it is all of that."""
    order = np.argsort(segments, kind="stable")
    begin = segments[order]
    end = begin + sizes[order]
    of = np.searchsorted(begin, blocks, side="right") - 1
    inside = (of >= 0) & (blocks < end[of.clip(0)])
    starts = np.concatenate((blocks[inside] + held[inside], begin))  # behind each block, and where a segment begins
    which = np.concatenate((of[inside], np.arange(len(begin))))
    stops = np.concatenate((blocks[inside], end))
    of_stop = np.concatenate((of[inside], np.arange(len(begin))))
    first = np.lexsort((starts, which))
    last = np.lexsort((stops, of_stop))  # the n-th begin of a segment's free pieces belongs to its n-th end
    size = stops[last] - starts[first]
    within = which[first]
    kept = size > 0
    many = np.bincount(of[inside], minlength=len(begin)) == 0
    return size[kept], within[kept], many[within[kept]]
