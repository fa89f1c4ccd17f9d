"""All ranks on one clock in one reduced trace, in the Trace Event Format that ui.perfetto.dev opens.

A rank is a process. Tracks of dlprof are above its threads and streams: its steps, the exclusive parts of the traced
steps, its stalls, its collectives (an arrow leads from the last rank to those that waited for it), and the ranks that
it waits for. Samples of the GPU, the process and the host are counters. The shortest spans are left out first, so that
a browser can hold the rest.

The format: Google, Trace Event Format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.communication.blame import blame
from dlprof.analysis.communication.collectives import host_clocks, matched
from dlprof.analysis.engine import (
    JOB,
    RANK,
    Frame,
    Job,
    Maybe,
    MeasureFailed,
    Progress,
    RankFacts,
    maybe,
    measure,
    needs,
    per_rank,
    within_rank,
)
from dlprof.analysis.input.loader import fetches
from dlprof.analysis.machine.samples import OPTIONS, held, placed_samples
from dlprof.analysis.step.partition import partition
from dlprof.analysis.timeline.host import parents, training_lane
from dlprof.analysis.timeline.steps import step_series
from dlprof.errors import DlprofError, NotMeasured
from dlprof.exports import whole_file
from dlprof.marks import __version__
from dlprof.read.run import Run
from dlprof.units import short

# Numbers of processes and threads: a rank's processes begin at (rank + 1) × this.
_THREADS = 1_000

# A job of many ranks has more waits than a user can look at.
MOST_ARROWS = 20_000

# Total spans of all ranks: about 60 MB of text, which the Perfetto page opens in some seconds. A rank of a very
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

# Sampled metrics: source, metric, track. The host's samples are read with its first rank.
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

# End of a metric's name → unit and factor. The longest matching end counts.
_UNITS = {
    "_bytes_per_s": ("bytes/s", 1),
    "_bytes": ("bytes", 1),
    "_cores": ("cores", 1),
    "_share": ("%", 100),
    "_mhz": ("MHz", 1),
    "_w": ("W", 1),
    "_c": ("°C", 1),
}


@dataclass(frozen=True)
class Written:
    """What a trace holds, and what was left out of it; `warnings`: what a reader of it should know."""

    spans: int
    left_out: int
    shortest_ns: int  # of the kept spans, if some were left out
    arrows: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Content:
    """The contents of the trace of a job, on one clock.

    `rows` have rank and _COLUMNS but place. Arrows have a number each: `ends` is that of the one that ends on a row
    (−1: none), `begins` those that begin there.
    """

    rows: pd.DataFrame
    counters: pd.DataFrame  # rank, _COUNTER
    spans: pd.DataFrame  # the rows that are spans of the traces
    names: dict[int, str]  # of the processes, by rank
    warnings: tuple[str, ...]


_COLUMNS = ("place", "category", "name", "start_ns", "dur_ns", "bytes", "ends", "begins", "because")
_COUNTER = ["name", "unit", "at_ns", "value"]
Event = dict[str, Any]


def write(run: Run, path: Path, jobs: int | None = None, progress: Progress | None = None) -> Written:
    """Write the trace of a run; packed where the name ends in .gz. Raises DlprofError if no rank has a trace."""
    try:
        content = measure(run, [_content], jobs, progress).call(_content)
    except (NotMeasured, MeasureFailed) as e:
        raise DlprofError(f"{run.path}: nothing to export: {e}") from None
    zero = int(content.rows["start_ns"].min())
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": zero,
        "otherData": {"exporter": f"dlprof {__version__}", "run": run.path.name},
    }
    with whole_file(path) as part, _open(part, packed=path.suffix == ".gz") as file:
        file.write(f'{_json(head)[:-1]},"traceEvents":[')
        for number, event in enumerate(_events(content, zero)):
            file.write((",\n" if number else "\n") + _json(event))
        file.write("\n]}\n")
    spans = content.spans
    total = int(spans.groupby("rank")["of"].first().sum())
    arrows = int((content.rows["ends"] >= 0).sum())
    return Written(len(spans), total - len(spans), int(spans["dur_ns"].min()), arrows, content.warnings)


def _open(path: Path, *, packed: bool) -> TextIO:
    if packed:
        return gzip.open(path, "wt", compresslevel=5, encoding="utf-8", errors="replace", newline="\n")
    return path.open("w", encoding="utf-8", errors="replace", newline="\n")


@within_rank
def own_tracks(
    step_series: Maybe[Frame] = maybe(step_series),
    stalls: Maybe[Frame] = maybe(schema.STALLS),
    chunks: Maybe[Frame] = maybe(schema.CHUNKS),
    fetches: Maybe[Frame] = maybe(fetches),
    partition: Maybe[dict[str, iv.Intervals]] = maybe(partition),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the tracks of one rank alone: track, name, start_ns, dur_ns. Raises NotMeasured if there is none."""
    found: list[pd.DataFrame] = []

    def add(track: str | pd.Series[str], names: str | pd.Series[str], rows: pd.DataFrame) -> None:
        found.append(rows[["start_ns", "dur_ns"]].assign(track=track, name=names))

    if step_series:
        steps = step_series.get()
        add(STEPS, steps["kind"].astype("str") + " step " + steps["step"].astype("str"), steps)
    if stalls:
        rows = stalls.get()
        rows = rows[rows["count"] == 1]  # a row that sums up several events has no place in time
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
    # The longest; among equally long ones, the first.
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
    tracks: pd.DataFrame = pd.concat([longest, own.assign(category=OWN, bytes=-1, of=0)], ignore_index=True)
    return tracks


@per_rank
def counters(
    spans: Frame = needs(schema.SPANS),
    placed_samples: Maybe[Frame] = maybe(placed_samples),
    memory: Maybe[Frame] = maybe(schema.MEMORY),
) -> pd.DataFrame:
    """Return what was sampled while a rank was traced: name, unit, at_ns, value; each value holds until the next.

    Raises NotMeasured if nothing was.
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


def _content(
    reduced: Frame = needs(reduced),
    host_clocks: Maybe[Frame] = maybe(host_clocks),
    matched: Maybe[Frame] = maybe(matched),
    blame: Maybe[Frame] = maybe(blame),
    counters: Maybe[Frame] = maybe(counters),
    job: Job = needs(JOB),
) -> _Content:
    hosts = {r: settings.host(job, r) for r in job.ranks}
    warnings: tuple[str, ...] = ()
    ahead = dict.fromkeys(job.ranks, 0)  # by how many ns each rank's clock is ahead
    if (clocks := host_clocks.or_none()) is not None:
        ahead = dict(zip(clocks["rank"], clocks["ahead_ns"].astype("int64"), strict=True))
    elif len(set(hosts.values())) > 1 or "" in hosts.values():
        warnings = (f"the hosts' clocks are taken as they are: {host_clocks.why()}",)
    spans = reduced.assign(start_ns=reduced["start_ns"] - reduced["rank"].map(ahead), ends=-1, begins="", because="")
    pairs = matched.or_none()
    rows = spans if pairs is None else pd.concat([spans, *_exchanges(pairs, blame.or_none())], ignore_index=True)
    readings = counters.or_none()
    if readings is None:
        readings = pd.DataFrame(columns=["rank", *_COUNTER])
    return _Content(
        rows=rows,
        counters=readings.assign(at_ns=readings["at_ns"] - readings["rank"].map(ahead)),
        spans=spans[spans["of"] > 0],
        names={r: f"rank {r}" + (f" · {host}" if host else "") for r, host in hosts.items()},
        warnings=warnings,
    )


def _exchanges(pairs: pd.DataFrame, blame: pd.DataFrame | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of the collectives of all ranks, and of who waits in them for whom and why."""
    last = pairs[pairs["last"]].drop_duplicates("instance").set_index("instance")["rank"]
    culprit = pairs["instance"].map(last).fillna(-1).astype("int64")
    ends, begins = _arrows(pairs)
    both = pairs[["rank", "bytes"]].assign(start_ns=pairs["start_ns"] - pairs["offset_ns"], category=OWN)
    exchanges = both.assign(
        track=EXCHANGES,
        name=(pairs["collective"].where(pairs["collective"] != "", "collective") + " " + pairs["group"]).str.strip(),
        dur_ns=pairs["end_ns"] - pairs["start_ns"],
        ends=ends,
        begins=begins,
        because="",
    )
    why: dict[tuple[int, int], str] = {}  # the main reason why a culprit was late for a waiting rank
    if blame is not None:
        top = blame.sort_values("ns", ascending=False, kind="stable").drop_duplicates(["rank", "culprit"])
        why = dict(zip(zip(top["rank"], top["culprit"], strict=True), top["category"], strict=True))
    waits = both.assign(
        track=WAITS,
        name="rank " + culprit.astype("str"),
        dur_ns=pairs["wait_ns"],
        ends=-1,
        begins="",
        because=[why.get(key, "") for key in zip(pairs["rank"], culprit, strict=True)],
    )
    return exchanges, waits[waits["dur_ns"] > 0]


def _arrows(pairs: pd.DataFrame) -> tuple[NDArray[np.int64], list[str]]:
    """Draw an arrow from each collective's last rank to every one that waited, of the longest waits MOST_ARROWS."""
    ends = np.full(len(pairs), -1, dtype=np.int64)
    begins = [""] * len(pairs)
    wait, instance = pairs["wait_ns"].to_numpy(), pairs["instance"].to_numpy()
    last = {int(i): at for at, i in enumerate(instance) if pairs["last"].iat[at]}
    longest = np.argsort(-wait, kind="stable")[:MOST_ARROWS]
    for number, at in enumerate(longest[wait[longest] > 0].tolist()):
        giver = last.get(int(instance[at]), at)
        if giver != at:
            ends[at] = number
            begins[giver] += f" {number}"
    return ends, begins


def _events(content: _Content, zero: int) -> Iterator[Event]:
    """Return all events, times from zero on."""
    for rank, rows in content.rows.groupby("rank", sort=True):
        number = int(str(rank))
        pid = (number + 1) * _THREADS
        rows, tracks = placed(rows)
        yield _meta(pid, pid, "process_name", name=content.names[number])
        yield _meta(pid, pid, "process_sort_index", sort_index=number)
        for tid, track in enumerate(tracks, pid + 1):
            yield _meta(pid, tid, "thread_name", name=track)
            yield _meta(pid, tid, "thread_sort_index", sort_index=tid - pid)
        yield from _spans(rows, pid, zero)
        for name, unit, at, value in content.counters[content.counters["rank"] == rank][_COUNTER].itertuples(
            index=False
        ):
            args = {unit: float(f"{value:.9g}")}
            yield {"ph": "C", "cat": OWN, "name": name, "pid": pid, "tid": pid, "ts": (at - zero) / 1000, "args": args}


def _spans(rows: pd.DataFrame, pid: int, zero: int) -> Iterator[Event]:
    """Return the events of a rank's rows, and the ends of their arrows. An arrow binds to the span that contains it."""
    flow = {"cat": OWN, "name": "released"}
    for place, category, name, start, dur, size, ends, begins, because in zip(
        *(rows[c].tolist() for c in _COLUMNS), strict=True
    ):
        # Below 2**53 ns a float64 in µs is exact to the ns.
        where = {"pid": pid, "tid": pid + place, "ts": (start - zero) / 1000}
        args = ({"bytes": int(size)} if size >= 0 else {}) | ({"because": because} if because else {})
        yield {"ph": "X", "cat": category, "name": name, **where, "dur": dur / 1000} | ({"args": args} if args else {})
        for arrow in begins.split():
            yield {"ph": "s", **flow, "id": int(arrow), **where}
        if ends >= 0:
            yield {"ph": "f", "bp": "e", **flow, "id": ends, **where, "ts": (start - zero + max(dur - 1, 0)) / 1000}


def _meta(pid: int, tid: int, what: str, **args: object) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _json(value: object) -> str:
    """Write letters unescaped: Perfetto does not decode escapes in names of processes and threads."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def placed(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows in order with `place`, the number of their track, and the tracks' names: dlprof's own ones first.

    Spans of one track lie within or behind each other, as the format wants it; one that begins within another and ends
    behind it (an asynchronous collective does) goes to a further track of the same name.
    """
    names = rows["track"].unique().tolist()
    training = [n for n in names if n.startswith("training thread")]
    devices = sorted(n for n in names if n.startswith("device"))
    workers = sorted((n for n in names if n.startswith(WORKER)), key=lambda n: (len(n), n))
    first = [t for t in TRACKS if t in names] + training + devices + workers
    order = [*first, *sorted(set(names) - set(first))]
    found: list[pd.DataFrame] = []
    tracks: list[str] = []
    for track in order:
        mine = rows[rows["track"] == track].sort_values(["start_ns", "dur_ns"], ascending=[True, False], kind="stable")
        more = 0
        # More tracks would be of no use; the remaining rows are left out.
        while len(mine) and len(tracks) < _THREADS - 2:
            fits = _nested(mine["start_ns"].to_numpy(), (mine["start_ns"] + mine["dur_ns"]).to_numpy())
            more += 1
            tracks.append(track if more == 1 else f"{track} ({more})")
            found.append(mine[fits].assign(place=len(tracks)))
            mine = mine[~fits]
    return pd.concat(found, ignore_index=True), tracks


def _nested(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which spans, in order of start and the longer first, nest correctly on one track."""
    fits = np.ones(len(start), dtype=bool)
    while True:
        rows = np.flatnonzero(fits)
        around = parents(start[rows], end[rows])
        wrong = (around >= 0) & (end[rows] > end[rows][np.maximum(around, 0)])
        if not wrong.any():
            return fits
        fits[rows[wrong]] = False


def _most(rank: RankFacts) -> int:
    """Return how many spans a rank may have: the job's ranks share MOST_SPANS."""
    ranks = rank.facts.get("world_size") or rank.trace_facts.get("world_size") or 1
    return max(MOST_SPANS // max(int(ranks), 1), FEWEST_SPANS)


def _counter(name: str, metric: str, at: pd.Series[int], value: pd.Series[float]) -> pd.DataFrame:
    unit, factor = next((u for ending, u in _UNITS.items() if metric.endswith(ending)), ("", 1))
    return pd.DataFrame({"name": name, "unit": unit, "at_ns": at.to_numpy(), "value": value.to_numpy() * factor})
