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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import __version__
from dlprof.analysis import settings
from dlprof.analysis.communication.blame import blame
from dlprof.analysis.communication.collectives import collectives, exposed, window_steps
from dlprof.analysis.communication.matching import host_clocks, matched
from dlprof.analysis.engine import Measured, MeasureFailed, Progress, measure
from dlprof.analysis.timeline.host import parents
from dlprof.errors import DlprofError, NotMeasured
from dlprof.exports import whole_file
from dlprof.exports.tracks import EXCHANGES, OWN, TRACKS, WAITS, WORKER, counters, reduced
from dlprof.read.run import Run

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
