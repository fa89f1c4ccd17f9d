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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.communication.blame import blame
from dlprof.analysis.communication.matching import host_clocks, matched
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, MeasureFailed, Progress, maybe, measure, needs
from dlprof.analysis.timeline.host import parents
from dlprof.errors import DlprofError, NotMeasured
from dlprof.exports import whole_file
from dlprof.exports.tracks import EXCHANGES, OWN, TRACKS, WAITS, WORKER, counters, reduced
from dlprof.marks import __version__
from dlprof.read.run import Run

# Numbers of processes and threads: a rank's processes begin at (rank + 1) × this.
_THREADS = 1_000

# A job of many ranks has more waits than anybody looks at.
MOST_ARROWS = 20_000


@dataclass(frozen=True)
class Written:
    """What a trace holds, and what was left out of it; `warnings`: what a reader of it should know."""

    spans: int
    left_out: int
    shortest_ns: int  # of the spans that were kept, where some were left out
    arrows: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Content:
    """What is written of a job, on clocks brought together.

    `rows` have rank and _COLUMNS but place. Arrows have a number each: `ends` is that of the one that ends on a row
    (−1: none), `begins` those that begin there.
    """

    rows: pd.DataFrame
    counters: pd.DataFrame  # rank, _COUNTER
    spans: pd.DataFrame  # those rows that are spans of the traces
    names: dict[int, str]  # of the processes, by rank
    warnings: tuple[str, ...]


_COLUMNS = ("place", "category", "name", "start_ns", "dur_ns", "bytes", "ends", "begins", "because")
_COUNTER = ["name", "unit", "at_ns", "value"]
Event = dict[str, Any]


def write(run: Run, path: Path, jobs: int | None = None, progress: Progress | None = None) -> Written:
    """Write the trace of a run; packed where the name ends in .gz. Raises DlprofError where no rank has a trace."""
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
    ahead = dict.fromkeys(job.ranks, 0)  # what each rank's clock is ahead by, ns
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
    why: dict[tuple[int, int], str] = {}  # what made a culprit late for a rank that waits for it, most of the time
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
    """Return the events of a rank's rows and the ends of their arrows, each of which binds to the span it lies in."""
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
    """Write letters as themselves: Perfetto shows escapes in names of processes and threads as they stand."""
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
        # Nobody looks at a thousand tracks; what is left would only spoil the last of them.
        while len(mine) and len(tracks) < _THREADS - 2:
            fits = _nested(mine["start_ns"].to_numpy(), (mine["start_ns"] + mine["dur_ns"]).to_numpy())
            more += 1
            tracks.append(track if more == 1 else f"{track} ({more})")
            found.append(mine[fits].assign(place=len(tracks)))
            mine = mine[~fits]
    return pd.concat(found, ignore_index=True), tracks


def _nested(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which spans, in order of start and the longer first, may stay together on one track."""
    fits = np.ones(len(start), dtype=bool)
    while True:
        rows = np.flatnonzero(fits)
        around = parents(start[rows], end[rows])
        wrong = (around >= 0) & (end[rows] > end[rows][np.maximum(around, 0)])
        if not wrong.any():
            return fits
        fits[rows[wrong]] = False
