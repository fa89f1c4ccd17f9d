"""What PyTorch's flight recorder saw: the collective that each rank waits in, and the ranks that never came.

All ranks of a process group issue the same collectives in the same order, and number them alike. So a rank that waits
in number 128 waits for those whose last number is lower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from dlprof import schema
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, across_ranks, needs, per_rank
from dlprof.analysis.memory.snapshot import shortened
from dlprof.units import listed

MOST_CALLS = 5_000  # of a rank, the last ones: the recorder's ring has 2,000 by default

# Why a rule cannot judge a run without dumps.
NO_DUMP = (
    "no dump of PyTorch's flight recorder (TORCH_FR_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 leave one a rank)"
)

# Collectives for which every rank of the group gives as much as any other, and gets as much.
ALIKE = frozenset(
    (
        *("all_reduce", "allreduce_coalesced", "broadcast", "reduce", "all_gather", "_all_gather_base"),
        *("all_gather_into_tensor_coalesced", "all_gather_single", "reduce_scatter", "_reduce_scatter_base"),
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_single"),
    )
)
# Those that no rank can end before all have come.
_FOR_ALL = (ALIKE - {"broadcast", "reduce"}) | {"barrier", "all_reduce_barrier", "all_to_all", "all_to_all_single"}
_ONE_SIDED = frozenset(("broadcast", "scatter", "gather", "reduce"))

DEFAULT = "default_pg"

_TEXTS = ("group", "about", "kind", "op", "backend", "state", "input", "output", "dtype", "site")


@per_rank
def recorded_calls(recorder_calls: Frame = needs(schema.RECORDER_CALLS), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return a rank's last collectives as its recorder kept them, in order.

    Columns: group, about, kind, sequence, op, backend, state, open (1: the rank still waits for it), left (1: it waits
    no more, and was never seen to complete), created_ns, timeout_ms, input, output, dtype, site, numbered (0: an old
    dump, whose numbers count sends and receives with the collectives).
    """
    frame = recorder_calls.tail(MOST_CALLS).reset_index(drop=True)
    done = (frame["state"] == "completed").to_numpy()
    retired = frame["retired"].to_numpy()
    kept = frame[[*_TEXTS, "sequence", "created_ns", "timeout_ms"]].astype(dict.fromkeys(_TEXTS, object))
    version = str((rank.trace_facts.get("recorder") or {}).get("version", ""))
    return kept.assign(
        open=(~done & (retired != 1)).astype(np.int64),
        left=(~done & (retired == 1)).astype(np.int64),
        numbered=int(not version.startswith("1.")),
    )


class Hang(Struct, frozen=True):
    """A collective that some ranks wait in.

    `missing`: ranks of the group whose dumps show that they never issued it. `unknown`: those that left no dump.
    `began`: the waiting ranks with it running on their device. `left`: no rank waits any more, and none recorded its
    completion.
    `follows`: each missing rank waits in another hang, which so comes first.
    """

    group: str
    op: str
    sequence: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]
    began: tuple[int, ...]
    since_ns: int
    timeout_ms: int
    site: str
    left: bool = False
    follows: bool = False
    mixed: bool = False  # the ranks that came did not issue the same collective

    @property
    def named(self) -> str:
        """The collective, with its number and group: "all_reduce #128 of the default group"."""
        return f"{self.op} #{self.sequence} of {self.group}"


@across_ranks
def whole_calls(recorded_calls: Frame = needs(recorded_calls), job: Job = needs(JOB)) -> pd.DataFrame:
    """Return the calls of all ranks with `key` (which group it is), `named` (how people name it) and short sites.

    Two groups may have one name where their ranks differ.
    """
    frame = recorded_calls.copy()
    ranks = {r: (job.trace_facts[r].get("recorder") or {}).get("groups") or {} for r in job.ranks}
    pairs = frame[["rank", "group", "about"]].drop_duplicates()
    keys: dict[tuple[int, str], str] = {}
    names: dict[tuple[int, str], str] = {}
    for rank, group, about in pairs.itertuples(index=False, name=None):
        members = ranks[rank].get(group) or ()
        keys[rank, group] = f"{group}|{','.join(map(str, members))}"
        names[rank, group] = "the default group" if about == DEFAULT else f"group {about or group}"
    places = list(zip(frame["rank"].tolist(), frame["group"].tolist(), strict=True))
    return frame.assign(
        key=[keys[place] for place in places],
        named=[names[place] for place in places],
        site=frame["site"].map(shortened(frame["site"])),
    )


@across_ranks
def hangs(whole_calls: Frame = needs(whole_calls), job: Job = needs(JOB)) -> tuple[Hang, ...]:
    """Return the collectives that ranks wait in, those that others follow from first, then the earliest."""
    calls = whole_calls[whole_calls["kind"] == "collective"]
    last: dict[Any, int] = calls.groupby(["key", "rank"])["sequence"].max().to_dict()
    for rank in job.ranks:
        enqueued = (job.trace_facts[rank].get("recorder") or {}).get("enqueued") or {}
        mine = calls[calls["rank"] == rank].drop_duplicates("key")
        for key, group in zip(mine["key"], mine["group"], strict=True):
            if (mine["numbered"] == 1).all():
                last[key, rank] = max(last[key, rank], enqueued.get(group, -1))
    waits = calls[calls["open"] == 1]
    if not len(waits):
        waits = calls[(calls["left"] == 1) & calls["op"].isin(_FOR_ALL)]
        # Whether a rank that knows the group never issued its collective of that number.
        lacking = [
            any(of == key and number < n for (of, _), number in last.items())
            for key, n in zip(waits["key"], waits["sequence"], strict=True)
        ]
        waits = waits[np.array(lacking, dtype=bool)]
    first = waits.sort_values("sequence", kind="stable").drop_duplicates(["key", "rank"])
    groups = first.groupby(["key", "sequence"], sort=False)
    return _ordered([_hang(calls, pending, last, job) for _, pending in groups])


def _hang(calls: pd.DataFrame, pending: pd.DataFrame, last: Mapping[tuple[str, int], int], job: Job) -> Hang:
    """Return the hang in one collective; `pending`: the call of each rank that waits in it."""
    one = pending.iloc[0]
    key, sequence = str(one["key"]), int(one["sequence"])
    rows = calls[(calls["key"] == key) & (calls["sequence"] == sequence)]
    here = rows[(rows["open"] == 1) | (rows["left"] == 1)]
    seen = {rank: number for (of, rank), number in last.items() if of == key}
    members = _members(key, str(one["about"]), seen, job)
    came = {rank for rank, number in seen.items() if number >= sequence}
    times = here.loc[here["created_ns"] > 0, "created_ns"]
    sites = here["site"][here["site"] != ""]
    return Hang(
        group=str(one["named"]),
        op=str(one["op"]),
        sequence=sequence,
        waiting=tuple(sorted(set(here["rank"].tolist()))),
        missing=tuple(sorted(rank for rank in members if rank in job.ranks and rank not in came)),
        unknown=tuple(sorted(rank for rank in members if rank not in job.ranks)),
        began=tuple(sorted(set(here.loc[here["state"] == "started", "rank"].tolist()))),
        since_ns=int(times.min()) if len(times) else -1,
        timeout_ms=int(pending["timeout_ms"].max()),
        site=str(sites.iloc[0]) if len(sites) else "",
        left=not bool((pending["open"] == 1).any()),
        mixed=rows["op"].nunique() > 1,
    )


def _members(key: str, about: str, seen: Iterable[int], job: Job) -> tuple[int, ...]:
    """Return the ranks of a group: as the dumps list them, all for the default one, else those that used it."""
    listed = key.rpartition("|")[2]
    if listed:
        return tuple(int(n) for n in listed.split(","))
    return tuple(range(job.world_size)) if about == DEFAULT else tuple(sorted(seen))


def _ordered(found: list[Hang]) -> tuple[Hang, ...]:
    """Say which hang follows from which, and return the first cause first."""
    waiting = {rank for hang in found for rank in hang.waiting if hang.missing or hang.unknown}
    ordered = [
        replace(hang, follows=bool(hang.missing) and not hang.unknown and set(hang.missing) <= waiting)
        for hang in found
    ]
    if ordered and all(hang.follows for hang in ordered):
        ordered = [replace(hang, follows=False) for hang in ordered]  # they wait for each other: none comes first
    return tuple(sorted(ordered, key=lambda hang: _place(hang, waiting)))


def _place(hang: Hang, waiting: set[int]) -> tuple[object, ...]:
    """Return a hang's sort key: hangs with missing ranks that wait nowhere come first, the earliest first."""
    elsewhere = len(waiting.intersection(hang.missing))
    return hang.follows, not hang.missing, not hang.unknown, elsewhere, hang.since_ns, hang.sequence


@across_ranks
def mismatches(whole_calls: Frame = needs(whole_calls)) -> pd.DataFrame:
    """Return the collectives of one number and group that are not the same on all ranks, a row for each variant.

    Columns: named, sequence, differs (operation, element type or size; the first that does), op, input, output, dtype,
    site, ranks (as text), rank (the first), many (ranks). In order of the first call.
    """
    calls = whole_calls[(whole_calls["kind"] == "collective") & (whole_calls["sequence"] >= 0)]
    mixed = whole_calls.loc[(whole_calls["kind"] == "p2p") & (whole_calls["numbered"] == 0), "key"].unique()
    calls = calls[~calls["key"].isin(mixed)]
    by = ["key", "sequence"]
    several = calls.groupby(by)[["op", "input", "output", "dtype"]].transform("nunique")
    alike = calls["op"].isin(ALIKE)
    sized = ((several["input"] > 1) | (several["output"] > 1)) & alike
    typed = (several["dtype"] > 1) & ~calls["op"].isin(_ONE_SIDED)
    what = np.select([several["op"] > 1, typed, sized], ["operation", "element type", "size"], "")
    calls = calls.assign(differs=what)
    wrong = calls[calls["differs"] != ""]
    rows = []
    parts = ["named", "sequence", "differs", "op", "input", "output", "dtype", "site"]
    order = wrong.groupby(by)["created_ns"].transform("min")
    wrong = wrong.assign(order=order).sort_values(["order", "key", "sequence"], kind="stable")
    for values, variant in wrong.groupby(["key", *parts], sort=False, dropna=False):
        ranks = sorted(set(variant["rank"].tolist()))
        rows.append((*values[1:], listed(ranks), ranks[0], len(ranks)))
    return pd.DataFrame(rows, columns=[*parts, "ranks", "rank", "many"])


@across_ranks
def rank_places(whole_calls: Frame = needs(whole_calls), hangs: tuple[Hang, ...] = needs(hangs)) -> pd.DataFrame:
    """Return where each rank is, by its dump: rank, doing, op, sequence, named, state, site, input, at_ns, and as
    text what and when.

    `doing`: waits in, left (its oldest collective that is not done), or last issued (it waits in none). Without a dump:
    no row.
    """
    rows = []
    of_hang = {(rank, hang.sequence, hang.group) for hang in hangs for rank in hang.waiting}
    for rank, mine in whole_calls.groupby("rank"):
        waits = mine[mine["open"] == 1]
        if not len(waits):
            known = [(rank, n, g) in of_hang for n, g in zip(mine["sequence"], mine["named"], strict=True)]
            waits = mine[np.array(known, dtype=bool) & (mine["left"] == 1).to_numpy()]
        row = (waits if len(waits) else mine.tail(1)).iloc[0]
        doing = "last issued" if not len(waits) else "waits in" if row["open"] else "left"
        rows.append((rank, doing, *row[["op", "sequence", "named", "state", "site", "input", "created_ns"]].tolist()))
    columns = ["rank", "doing", "op", "sequence", "named", "state", "site", "input", "at_ns"]
    frame = pd.DataFrame(rows, columns=columns)
    what = [f"{op} #{n} of {of}" for op, n, of in zip(frame["op"], frame["sequence"], frame["named"], strict=True)]
    return frame.assign(what=what, when=[moment(at)[11:19] for at in frame["at_ns"]])


def has_one_rank(job: Job) -> bool:
    """Return whether the job is known to have one rank only, which exchanges nothing."""
    return job.world_size == 1


def moment(ns: int) -> str:
    """Write a time of day with its date, UTC; "" where it is unknown."""
    if ns <= 0:
        return ""
    return datetime.fromtimestamp(ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def any_dump(whole_calls: Maybe[Any]) -> bool:
    """Return whether a dump of the recorder was read."""
    return whole_calls.or_none() is not None
