"""What is drawn of each rank for Perfetto: spans of its trace, dlprof's own tracks, and counters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, RankFacts, per_rank
from dlprof.analysis.machine.samples import held
from dlprof.errors import NotMeasured
from dlprof.units import short

# So many spans of all ranks together: about 60 MB of text, which the Perfetto page opens in some seconds.
MOST_SPANS = 400_000

# A rank of a very large job still has so many.
FEWEST_SPANS = 2_000

# The same of a rank's exclusive parts of its steps.
PARTS_SHARE = 0.2

LONGEST_NAME = 300

STEPS, PARTS, STALLS = "steps", "where the step goes", "stalls"

EXCHANGES, WAITS, CHUNKS = "collectives", "waits for", "pipeline"

WORKER = "loader worker "

TRACKS = (STEPS, PARTS, WAITS, EXCHANGES, STALLS, CHUNKS)

OWN = "dlprof"

# Kinds of spans as Kineto's categories, host and device.
_CATEGORIES = {
    "annotation": ("user_annotation", "gpu_user_annotation"),
    "communication": ("user_annotation", "kernel"),
    "copy": ("", "gpu_memcpy"),
    "fetch": ("user_annotation", ""),
    "kernel": ("", "kernel"),
    "op": ("cpu_op", ""),
    "python": ("python_function", ""),
    "runtime": ("cuda_runtime", ""),
    "set": ("", "gpu_memset"),
    "sync": ("", "cuda_sync"),
}

# What was sampled: source, metric, its track. The host's is read on its first rank.
_COUNTERS = (
    ("gpu", "busy_share", "GPU: some kernel runs"),
    ("gpu", "sm_busy_share", "GPU: multiprocessors at work"),
    ("gpu", "tensor_busy_share", "GPU: tensor cores at work"),
    ("gpu", "dram_share", "GPU: memory bandwidth in use"),
    ("gpu", "power_w", "GPU: power"),
    ("gpu", "sm_clock_mhz", "GPU: clock of the multiprocessors"),
    ("gpu", "temperature_c", "GPU: temperature"),
    ("gpu", "memory_used_bytes", "GPU: memory in use"),
    ("gpu", "pcie_received_bytes_per_s", "GPU: received over PCIe"),
    ("gpu", "pcie_sent_bytes_per_s", "GPU: sent over PCIe"),
    ("gpu", "nvlink_received_bytes_per_s", "GPU: received over NVLink"),
    ("gpu", "nvlink_sent_bytes_per_s", "GPU: sent over NVLink"),
    ("processes", "cpu_cores", "process: cores in use"),
    ("processes", "children_cpu_cores", "loader workers and other children: cores in use"),
    ("processes", "main_thread_waited_share", "training thread: ready, but no core free"),
    ("processes", "rss_bytes", "process: memory"),
    ("host", "cpu_cores", "host: cores in use"),
    ("host", "memory_used_bytes", "host: memory in use"),
    ("host", "disk_read_bytes_per_s", "host: read from disks"),
    ("host", "disk_written_bytes_per_s", "host: written to disks"),
    ("host", "network_received_bytes_per_s", "host: received over the network"),
    ("host", "network_sent_bytes_per_s", "host: sent over the network"),
)

_ALLOCATOR = {"allocated_bytes": "PyTorch: memory of tensors", "reserved_bytes": "PyTorch: memory reserved"}

# By the end of a metric's name: its unit, and what makes it that. The longest that fits counts.
_UNITS = {
    "_bytes_per_s": ("bytes/s", 1),
    "_bytes": ("bytes", 1),
    "_cores": ("cores", 1),
    "_share": ("%", 100),
    "_mhz": ("MHz", 1),
    "_w": ("W", 1),
    "_c": ("°C", 1),
}


@per_rank
def reduced(
    spans: pd.DataFrame,
    training_lane: str,
    step_series: Maybe[pd.DataFrame],
    stalls: Maybe[pd.DataFrame],
    chunks: Maybe[pd.DataFrame],
    fetches: Maybe[pd.DataFrame],
    partition: Maybe[dict[str, iv.Intervals]],
    rank: RankFacts,
) -> pd.DataFrame:
    """Return a rank's longest spans, and tracks of dlprof's own: track, category, name, start_ns, dur_ns, bytes, of.

    `of` is how many spans there were, 0 on the own tracks. As many are kept as the job's ranks share MOST_SPANS.
    """
    said = rank.facts.get("world_size") or rank.trace_facts.get("world_size") or 1
    most = max(MOST_SPANS // max(int(said), 1), FEWEST_SPANS)
    found = [_spans(spans, training_lane, most)]
    if len(spans):
        begin = int(spans["start_ns"].min())
        end = int((spans["start_ns"] + spans["dur_ns"]).max())
        tracks = _own(step_series, stalls, chunks, fetches, partition, int(most * PARTS_SHARE))
        found += [_track(name, names, frame, begin, end) for name, names, frame in tracks]
    return pd.concat([f for f in found if len(f)] or found[:1], ignore_index=True)


def _spans(spans: pd.DataFrame, training: str, most: int) -> pd.DataFrame:
    dur = spans["dur_ns"].to_numpy()
    # The longest; of equally long ones the first, which are not to be told apart anyway.
    kept = np.sort(np.argsort(-dur, kind="stable")[:most]) if len(dur) > most else np.arange(len(dur))
    chosen = spans.iloc[kept]
    lane = chosen["lane"].astype("str")
    of_device = lane.str.startswith("device")
    kind = chosen["kind"].astype("str")
    category = np.where(
        of_device,
        kind.map({k: c[1] for k, c in _CATEGORIES.items()}),
        kind.map({k: c[0] for k, c in _CATEGORIES.items()}),
    )
    track = lane.mask(lane == training, f"training thread ({training.removeprefix('host:')})")
    return pd.DataFrame(
        {
            "track": track.str.replace("^host:", "thread ", regex=True).str.replace(":", " stream ").to_numpy(),
            "category": category,
            "name": chosen["name"].map({n: short(n, LONGEST_NAME) for n in chosen["name"].cat.categories}).to_numpy(),
            "start_ns": chosen["start_ns"].to_numpy(),
            "dur_ns": chosen["dur_ns"].to_numpy(),
            "bytes": chosen["bytes"].to_numpy(),
            "of": len(spans),
        }
    )


def _own(
    step_series: Maybe[pd.DataFrame],
    stalls: Maybe[pd.DataFrame],
    chunks: Maybe[pd.DataFrame],
    fetches: Maybe[pd.DataFrame],
    partition: Maybe[dict[str, iv.Intervals]],
    most: int,
) -> Iterator[tuple[str, pd.Series[str], pd.DataFrame]]:
    """Return the tracks of one rank alone: title, names and rows."""
    steps = step_series.or_none()
    if steps is not None:
        yield STEPS, steps["kind"] + " step " + steps["step"].astype("str"), steps
    if stalls:
        held = stalls.get()
        held = held[held["count"] == 1]  # a row that stands for several has no place in time
        yield STALLS, held["kind"].astype("str"), held
    if chunks:
        table = chunks.get()
        number = table["microbatch"].astype("str").where(table["microbatch"] >= 0, "")
        yield CHUNKS, (table["action"].astype("str") + " " + number).str.strip(), table
    if fetches:
        table = fetches.get()
        # A row that stands for several batches has no place in time.
        for worker, mine in table[(table["worker"] >= 0) & (table["count"] == 1)].groupby("worker"):
            yield f"{WORKER}{worker}", pd.Series("batch", index=mine.index), mine
    parts = partition.or_none()
    if parts is not None:
        pieces = [(c, s, e - s) for c, p in parts.items() for s, e in p]
        frame = pd.DataFrame(pieces, columns=["name", "start_ns", "dur_ns"])
        yield PARTS, frame["name"], frame.nlargest(most, "dur_ns")


def _track(track: str, name: pd.Series[str], frame: pd.DataFrame, begin: int, end: int) -> pd.DataFrame:
    start, dur = frame["start_ns"].to_numpy(), frame["dur_ns"].to_numpy()
    inside = (start < end) & (start + dur > begin)
    names = name.reindex(frame.index).to_numpy()[inside]
    made = pd.DataFrame({"start_ns": start[inside], "dur_ns": dur[inside], "name": names})
    return made.assign(track=track, category=OWN, bytes=-1, of=0)


@per_rank
def counters(spans: pd.DataFrame, samples: Maybe[pd.DataFrame], memory: Maybe[pd.DataFrame]) -> pd.DataFrame:
    """Return what was sampled while a rank was traced: name, unit, at_ns, value; each value holds until the next.

    Raises NotMeasured where nothing was.
    """
    if not len(spans):
        raise NotMeasured("nothing was traced")
    begin, end = int(spans["start_ns"].min()), int((spans["start_ns"] + spans["dur_ns"]).max())
    parts = []
    with suppress(NotMeasured):
        told = held(samples.get(), begin, end)
        for source, metric, name in _COUNTERS:
            parts.append(_counter(name, metric, told[(told["source"] == source) & (told["metric"] == metric)]))
        for log in sorted(set(told["source"][told["source"].str.startswith("nvidia-smi")])):
            of_log = told[told["source"] == log]
            for source, metric, name in _COUNTERS:
                if source == "gpu":
                    title = f"{log}: {name.removeprefix('GPU: ')}"
                    parts.append(_counter(title, metric, of_log[of_log["metric"] == metric]))
    if memory:
        table = memory.get()
        at = table["at_ns"].to_numpy()
        inside = table.iloc[max(int(np.searchsorted(at, begin, side="right")) - 1, 0) : np.searchsorted(at, end)]
        for column, name in _ALLOCATOR.items():
            known = inside[inside[column] >= 0]
            readings = {"at_ns": known["at_ns"].clip(lower=begin), "value": known[column]}
            parts.append(_counter(name, column, pd.DataFrame(readings)))
    parts = [part for part in parts if len(part)]
    if not parts:
        raise NotMeasured("nothing was sampled")
    return pd.concat(parts, ignore_index=True)


def _counter(name: str, metric: str, readings: pd.DataFrame) -> pd.DataFrame:
    unit, factor = next((u for ending, u in _UNITS.items() if metric.endswith(ending)), ("", 1))
    at, value = readings["at_ns"].to_numpy(), readings["value"].to_numpy() * factor
    return pd.DataFrame({"name": name, "unit": unit, "at_ns": at, "value": value})
