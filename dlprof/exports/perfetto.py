"""All ranks on one clock in one reduced trace, in the Trace Event Format that ui.perfetto.dev opens.

A rank is a process. Above its threads and streams stand tracks of dlprof's own: its steps, the exclusive parts of the
traced ones, its stalls, its collectives (an arrow leads from the last rank to come to those that waited for it), and
whom it waits for; as counters what was sampled beside it of the GPU, the process and the host. The shortest spans are
left out first, so that a browser can hold what is left.

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

from dlprof import __version__
from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.communication.blame import blame
from dlprof.analysis.communication.collectives import collectives, exposed, window_steps
from dlprof.analysis.communication.matching import host_clocks, matched
from dlprof.analysis.engine import Maybe, Measured, MeasureFailed, Progress, RankFacts, measure, per_rank
from dlprof.analysis.machine.samples import held
from dlprof.analysis.timeline.host import parents
from dlprof.errors import DlprofError, NotMeasured
from dlprof.exports import whole_file
from dlprof.read.run import Run
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

# Numbers of processes and threads: a rank's processes begin at (rank + 1) × this.
_THREADS = 1_000
# A job of many ranks has more waits than anybody looks at.
MOST_ARROWS = 20_000
# Rows that are written as one piece.
_PIECE = 20_000


@dataclass(frozen=True)
class Written:
    """What a trace holds, and what was left out of it; `warnings`: what a reader of it should know."""

    spans: int
    left_out: int
    shortest_ns: int  # of the spans that were kept, where some were left out
    arrows: int
    warnings: tuple[str, ...]


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


NEEDS = (blame, collectives, counters, exposed, host_clocks, reduced, window_steps)


def write(run: Run, path: Path, jobs: int | None = None, progress: Progress | None = None) -> Written:
    """Write the trace of a run; packed where the name ends in .gz. Raises DlprofError where no rank has a trace."""
    measured = measure(run, NEEDS, jobs, progress)
    try:
        frame = measured.frame(reduced)
    except NotMeasured as e:
        raise DlprofError(f"{run.path}: nothing to export: {e}") from None
    except MeasureFailed as e:
        raise DlprofError(f"{run.path}: cannot be exported: {e}") from None
    ahead, warnings = _ahead(measured)
    shared = _shared(measured)
    sampled = _sampled(measured)
    frame = frame.assign(start_ns=frame["start_ns"] - frame["rank"].map(ahead).to_numpy(dtype=np.int64))
    zero = int(frame["start_ns"].min())
    spans = frame.loc[frame["of"] > 0]
    arrows = 0
    with whole_file(path) as part, _open(part, packed=path.suffix == ".gz") as file:
        file.write(_head(run, zero) + _meta(_process(measured, measured.ranks[0])))
        for rank, mine in frame.groupby("rank", sort=True):
            number = int(str(rank))
            ours = shared[shared["rank"] == number]
            rows = pd.concat([mine, ours], ignore_index=True) if len(ours) else mine
            arrows += _rank(file, measured, number, rows.reset_index(drop=True), zero)
            _count(file, sampled[sampled["rank"] == number], number, zero - ahead[number])
        file.write("\n]}\n")
    total = int(spans.groupby("rank")["of"].first().sum())
    return Written(len(spans), total - len(spans), int(spans["dur_ns"].min()), arrows, tuple(warnings))


def _open(path: Path, *, packed: bool) -> TextIO:
    if packed:
        return gzip.open(path, "wt", compresslevel=5, encoding="utf-8", errors="replace", newline="\n")
    return path.open("w", encoding="utf-8", errors="replace", newline="\n")


def _ahead(run: Measured) -> tuple[dict[int, int], list[str]]:
    """Return what each rank's clock is ahead by, ns, and a warning where that is not known."""
    try:
        frame = run.frame(host_clocks)
    except (NotMeasured, MeasureFailed) as e:
        hosts = {settings.host(run, r) for r in run.ranks}
        told = [] if len(hosts) == 1 and "" not in hosts else [f"the hosts' clocks are taken as they are: {e}"]
        return dict.fromkeys(run.ranks, 0), told
    return {int(r): int(ns) for r, ns in zip(frame["rank"], frame["ahead_ns"], strict=True)}, []


def _shared(run: Measured) -> pd.DataFrame:
    """Return the collectives of all ranks and who waits in them for whom, on clocks brought together.

    Arrows have a number each: `ends` is that of the one that ends on a row (−1: none), `begins` those that begin there.
    """
    columns = ["rank", "track", "category", "name", "start_ns", "dur_ns", "bytes", "ends", "begins", "because"]
    try:
        pairs = run.frame(matched)
    except (NotMeasured, MeasureFailed):
        return pd.DataFrame({c: pd.Series(dtype="int64" if c == "rank" else "object") for c in columns})
    last = pairs[pairs["last"]].drop_duplicates("instance").set_index("instance")["rank"]
    culprit = pairs["instance"].map(last).fillna(-1).to_numpy(dtype=np.int64)
    ends, begins = _arrows(pairs)
    start = (pairs["start_ns"] - pairs["offset_ns"]).to_numpy()
    both = pd.DataFrame({"rank": pairs["rank"].to_numpy(), "category": OWN, "bytes": pairs["bytes"].to_numpy()})
    exchanges = both.assign(
        track=EXCHANGES,
        name=(pairs["collective"].where(pairs["collective"] != "", "collective") + " " + pairs["group"])
        .str.strip()
        .to_numpy(),
        start_ns=start,
        dur_ns=(pairs["end_ns"] - pairs["start_ns"]).to_numpy(),
        ends=ends,
        begins=begins,
        because="",
    )
    reasons = _reasons(run)
    waits = both.assign(
        track=WAITS,
        name=[f"rank {c}" for c in culprit],
        start_ns=start,
        dur_ns=pairs["wait_ns"].to_numpy(),
        ends=-1,
        begins="",
        because=[reasons.get((int(r), int(c)), "") for r, c in zip(pairs["rank"], culprit, strict=True)],
    )
    together: pd.DataFrame = pd.concat([exchanges, waits[waits["dur_ns"] > 0]], ignore_index=True)
    return together[columns]


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


def _reasons(run: Measured) -> dict[tuple[int, int], str]:
    """Return what made a culprit late for a rank that waits for it, most of the time."""
    try:
        frame = run.frame(blame)
    except (NotMeasured, MeasureFailed):
        return {}
    top = frame.sort_values("ns", ascending=False, kind="stable").drop_duplicates(["rank", "culprit"])
    return {(int(r), int(c)): str(why) for r, c, why in zip(top["rank"], top["culprit"], top["category"], strict=True)}


def _head(run: Run, zero: int) -> str:
    told = {"exporter": f"dlprof {__version__}", "run": run.path.name}
    return (
        f'{{"schemaVersion":1,"displayTimeUnit":"ms","baseTimeNanoseconds":{zero},'
        f'"otherData":{_json(told)},"traceEvents":[\n'
    )


def _rank(file: TextIO, run: Measured, rank: int, rows: pd.DataFrame, zero: int) -> int:
    """Write the events of one rank; give how many arrows end on it."""
    pid = (rank + 1) * _THREADS
    rows, tracks = placed(rows)
    metas = [_process(run, rank), (pid, pid, "process_sort_index", {"sort_index": rank})]
    for place, track in enumerate(tracks, 1):
        metas.append((pid, pid + place, "thread_name", {"name": track}))
        metas.append((pid, pid + place, "thread_sort_index", {"sort_index": place}))
    file.writelines(",\n" + _meta(meta) for meta in metas)
    quoted: dict[str, str] = {}

    def text(value: str) -> str:
        found = quoted.get(value)
        if found is None:
            found = quoted[value] = _json(value)
        return found

    if "ends" not in rows:
        rows = rows.assign(ends=-1, begins="", because="")
    texts = {c: rows[c].fillna("") for c in ("begins", "because")}
    rows = rows.assign(ends=rows["ends"].fillna(-1).astype(np.int64), **texts)
    flow = f'"cat":"{OWN}","name":"released"'
    arrows = 0
    for first in range(0, len(rows), _PIECE):
        piece = rows.iloc[first : first + _PIECE]
        lines = []
        for place, category, called, start, dur, size, ends, begins, because in zip(
            *(
                piece[c].tolist()
                for c in ("place", "category", "name", "start_ns", "dur_ns", "bytes", "ends", "begins", "because")
            ),
            strict=True,
        ):
            args = f'"bytes":{int(size)}' if size >= 0 else ""
            args += f'{"," if args else ""}"because":{text(because)}' if because else ""
            at = f'"pid":{pid},"tid":{pid + place},"ts":{_us(start - zero)}'
            lines.append(
                f'{{"ph":"X","cat":{text(category)},"name":{text(called)},{at},"dur":{_us(dur)}'
                + (f',"args":{{{args}}}}}' if args else "}")
            )
            # Each end binds to the span that it lies in.
            lines += [f'{{"ph":"s",{flow},"id":{number},{at}}}' for number in begins.split()]
            if ends >= 0:
                leaves = _us(start - zero + max(dur - 1, 0))
                lines.append(f'{{"ph":"f","bp":"e",{flow},"id":{ends},"pid":{pid},"tid":{pid + place},"ts":{leaves}}}')
                arrows += 1
        file.write(",\n" + ",\n".join(lines))
    return arrows


def _sampled(run: Measured) -> pd.DataFrame:
    """Return the counters of all ranks; no rows where nothing was sampled."""
    try:
        return run.frame(counters)
    except (NotMeasured, MeasureFailed):
        return pd.DataFrame({"rank": [], "name": [], "unit": [], "at_ns": [], "value": []})


def _count(file: TextIO, rows: pd.DataFrame, rank: int, zero: int) -> None:
    """Write the counters of one rank; `zero` on its own clock."""
    pid = (rank + 1) * _THREADS
    for name, mine in rows.groupby("name", sort=False):
        unit = _json(str(mine["unit"].iloc[0]))
        head = f',\n{{"ph":"C","cat":"{OWN}","name":{_json(name)},"pid":{pid},"tid":{pid}'
        file.writelines(
            f'{head},"ts":{_us(at - zero)},"args":{{{unit}:{value:.9g}}}}}'
            for at, value in zip(mine["at_ns"].tolist(), mine["value"].tolist(), strict=True)
        )


def _us(ns: int) -> str:
    """Write ns as µs, exactly."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


_Meta = tuple[int, int, str, dict[str, Any]]  # process, thread, what is told, and its value


def _process(run: Measured, rank: int) -> _Meta:
    """Name a rank's process."""
    pid = (rank + 1) * _THREADS
    name = settings.host(run, rank)
    return pid, pid, "process_name", {"name": f"rank {rank}" + (f" · {name}" if name else "")}


def _meta(told: _Meta) -> str:
    return _json(dict(zip(("ph", "pid", "tid", "name", "args"), ("M", *told), strict=True)))


def _json(value: object) -> str:
    """Write letters as themselves: of names of processes and threads Perfetto shows escapes as they stand."""
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
    found, tracks = [], []
    for track in order:
        mine = rows[rows["track"] == track].sort_values(["start_ns", "dur_ns"], ascending=[True, False], kind="stable")
        more = 0
        while len(mine):
            start = mine["start_ns"].to_numpy()
            end = start + mine["dur_ns"].to_numpy()
            fits = _nested(start, end)
            tracks.append(track if not more else f"{track} ({more + 1})")
            found.append(mine[fits].assign(place=len(tracks)))
            mine, more = mine[~fits], more + 1
            if len(tracks) >= _THREADS - 2:
                # Nobody looks at a thousand tracks; what is left would only spoil the last of them.
                mine = mine.iloc[:0]
    return pd.concat(found, ignore_index=True), tracks


def _nested(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell of spans, in order of start and the longer first, which may stay together on one track."""
    fits = np.ones(len(start), dtype=bool)
    while True:
        rows = np.flatnonzero(fits)
        around = parents(start[rows], end[rows])
        wrong = (around >= 0) & (end[rows] > end[rows][np.maximum(around, 0)])
        if not wrong.any():
            return fits
        fits[rows[wrong]] = False
