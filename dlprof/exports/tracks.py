"""What is drawn of each rank for Perfetto: spans of its trace, dlprof's own tracks, and counters."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank, within_rank
from dlprof.analysis.input.loader import fetches
from dlprof.analysis.machine.log_clocks import OPTIONS, placed_samples
from dlprof.analysis.machine.samples import held
from dlprof.analysis.step.partition import partition
from dlprof.analysis.timeline.host import training_lane
from dlprof.analysis.timeline.steps import step_series
from dlprof.errors import NotMeasured
from dlprof.units import short

# Spans of all ranks together: about 60 MB of text, which the Perfetto page opens in some seconds. A rank of a very
# large job still has FEWEST_SPANS; the exclusive parts of its steps are at most PARTS_SHARE of that again.
MOST_SPANS = 400_000
FEWEST_SPANS = 2_000
PARTS_SHARE = 0.2
LONGEST_NAME = 300

OWN = "dlprof"
STEPS, PARTS, STALLS, CHUNKS = "steps", "where the step goes", "stalls", "pipeline"
EXCHANGES, WAITS = "collectives", "waits for"
TRACKS = (STEPS, PARTS, WAITS, EXCHANGES, STALLS, CHUNKS)
WORKER = "loader worker "

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


def _most(rank: RankFacts) -> int:
    """Return how many spans a rank may have: the job's ranks share MOST_SPANS."""
    ranks = rank.facts.get("world_size") or rank.trace_facts.get("world_size") or 1
    return max(MOST_SPANS // max(int(ranks), 1), FEWEST_SPANS)


@within_rank
def own_tracks(
    step_series: Maybe[Frame] = maybe(step_series),
    stalls: Maybe[Frame] = maybe(schema.STALLS),
    chunks: Maybe[Frame] = maybe(schema.CHUNKS),
    fetches: Maybe[Frame] = maybe(fetches),
    partition: Maybe[dict[str, iv.Intervals]] = maybe(partition),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the tracks of one rank alone: track, name, start_ns, dur_ns. Raises NotMeasured where there is none."""
    found: list[pd.DataFrame] = []

    def add(track: str | pd.Series[str], names: str | pd.Series[str], rows: pd.DataFrame) -> None:
        found.append(rows[["start_ns", "dur_ns"]].assign(track=track, name=names))

    if step_series:
        steps = step_series.get()
        add(STEPS, steps["kind"].astype("str") + " step " + steps["step"].astype("str"), steps)
    if stalls:
        rows = stalls.get()
        rows = rows[rows["count"] == 1]  # a row that stands for several has no place in time
        add(STALLS, rows["kind"].astype("str"), rows)
    if chunks:
        rows = chunks.get()
        number = rows["microbatch"].astype("str").where(rows["microbatch"] >= 0, "")
        add(CHUNKS, (rows["action"].astype("str") + " " + number).str.strip(), rows)
    if fetches:
        rows = fetches.get()
        rows = rows[(rows["worker"] >= 0) & (rows["count"] == 1)]
        add(WORKER + rows["worker"].astype("str"), "batch", rows)
    if partition:
        pieces = [(part, start, end - start) for part, of in partition.get().items() for start, end in of]
        rows = pd.DataFrame(pieces, columns=["name", "start_ns", "dur_ns"])
        rows = rows.nlargest(int(_most(rank) * PARTS_SHARE), "dur_ns")
        add(PARTS, rows["name"], rows)
    if not found:
        raise NotMeasured("nothing was recorded")
    return pd.concat(found, ignore_index=True)


@per_rank
def reduced(
    spans: Frame = needs(schema.SPANS),
    training_lane: str = needs(training_lane),
    own_tracks: Maybe[Frame] = maybe(own_tracks),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return a rank's longest spans, and tracks of dlprof's own: track, category, name, start_ns, dur_ns, bytes, of.

    `of` is how many spans there were, 0 on dlprof's own tracks.
    """
    dur, most = spans["dur_ns"].to_numpy(), _most(rank)
    # The longest; of equally long ones the first, which are not to be told apart anyway.
    kept = np.sort(np.argsort(-dur, kind="stable")[:most]) if len(dur) > most else np.arange(len(dur))
    chosen = spans.iloc[kept]
    lane, kind = chosen["lane"].astype("str"), chosen["kind"].astype("str")
    host, device = (kind.map({k: names[side] for k, names in _CATEGORIES.items()}) for side in (0, 1))
    track = lane.mask(lane == training_lane, f"training thread ({training_lane.removeprefix('host:')})")
    longest = pd.DataFrame(
        {
            "track": track.str.replace("^host:", "thread ", regex=True).str.replace(":", " stream ").to_numpy(),
            "category": host.where(~lane.str.startswith("device"), device).to_numpy(),
            "name": chosen["name"].map({n: short(n, LONGEST_NAME) for n in chosen["name"].cat.categories}).to_numpy(),
            "start_ns": chosen["start_ns"].to_numpy(),
            "dur_ns": chosen["dur_ns"].to_numpy(),
            "bytes": chosen["bytes"].to_numpy(),
            "of": len(spans),
        }
    )
    if not len(spans) or not own_tracks:
        return longest
    begin, end = spans["start_ns"].min(), (spans["start_ns"] + spans["dur_ns"]).max()
    own = own_tracks.get()
    own = own[(own["start_ns"] < end) & (own["start_ns"] + own["dur_ns"] > begin)]
    together: pd.DataFrame = pd.concat([longest, own.assign(category=OWN, bytes=-1, of=0)], ignore_index=True)
    return together


@per_rank
def counters(
    spans: Frame = needs(schema.SPANS),
    placed_samples: Maybe[Frame] = maybe(placed_samples),
    memory: Maybe[Frame] = maybe(schema.MEMORY),
) -> pd.DataFrame:
    """Return what was sampled while a rank was traced: name, unit, at_ns, value; each value holds until the next.

    Raises NotMeasured where nothing was.
    """
    if not len(spans):
        raise NotMeasured("nothing was traced")
    begin, end = int(spans["start_ns"].min()), int((spans["start_ns"] + spans["dur_ns"]).max())
    parts = []
    with suppress(NotMeasured):
        readings = held(placed_samples.get(), begin, end)
        logs = sorted(set(readings["source"][readings["source"].str.startswith((*OPTIONS,))]))
        of_logs = [(log, m, f"{log}: {n.removeprefix('GPU: ')}") for log in logs for s, m, n in _COUNTERS if s == "gpu"]
        for source, metric, name in (*_COUNTERS, *of_logs):
            mine = readings[(readings["source"] == source) & (readings["metric"] == metric)]
            parts.append(_counter(name, metric, mine["at_ns"], mine["value"]))
    if memory:
        table = memory.get()
        at = table["at_ns"].to_numpy()
        inside = table.iloc[max(int(np.searchsorted(at, begin, side="right")) - 1, 0) : np.searchsorted(at, end)]
        for column, name in _ALLOCATOR.items():
            known = inside[inside[column] >= 0]
            parts.append(_counter(name, column, known["at_ns"].clip(lower=begin), known[column]))
    parts = [part for part in parts if len(part)]
    if not parts:
        raise NotMeasured("nothing was sampled")
    return pd.concat(parts, ignore_index=True)


def _counter(name: str, metric: str, at: pd.Series[int], value: pd.Series[float]) -> pd.DataFrame:
    unit, factor = next((u for ending, u in _UNITS.items() if metric.endswith(ending)), ("", 1))
    return pd.DataFrame({"name": name, "unit": unit, "at_ns": at.to_numpy(), "value": value.to_numpy() * factor})
