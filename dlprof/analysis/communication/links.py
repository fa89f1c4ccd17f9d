"""The links that large collectives judge: how fast each group of ranks exchanges, and what it could.

That is what its peak allows, and what groups like it take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.communication.bandwidth import CLASSES, bandwidth, bus_factor, size_classes
from dlprof.analysis.communication.collectives import NO_SIZES
from dlprof.analysis.communication.matching import matched
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs
from dlprof.errors import NotMeasured
from dlprof.result import Change, Setting
from dlprof.units import size

# Every rank gives and takes as much as the others: what is asked of each link follows from the bytes.
JUDGED = ("all_reduce", "all_gather", "reduce_scatter")

# Two groups start alike, so their times can be compared from where bytes take longer than a start does. Against a peak
# of hundreds of GB/s, it takes 16 MiB.
LARGE_BYTES = CLASSES[2]
LARGE_FOR_PEAK = CLASSES[3]

# The fewest links between two GPUs that have any are one of a V100's six. Below an eighth of all of them is PCIe's
# range (16 of 150, 32 of 300, 63 of 450 GB/s, less what it loses), or the host's memory.
SLOW_OF_PEAK = 1 / 8

# nccl-tests reaches 75 to 80 % of NVLink's peak with large messages.
ATTAINABLE = 0.75

# A slow one is slow so many times.
LEAST_COUNT = 3

# Links fail by halves: one port of two, half of a slot's lanes. Half way there is more than neighbours' traffic.
SLOWER = 1.5

# Sizes are alike to this factor.
ALIKE_SIZE = 2.0

# What turns a fast path off: within hosts, between them, or both; with which values (none: any); what it does.
_ON = ("1", "2", "true", "TRUE", "y", "yes")
_SETTINGS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("NCCL_P2P_DISABLE", "within", _ON, "it sends what the GPUs of a host exchange through the host's memory"),
    ("NCCL_P2P_LEVEL", "within", ("LOC", "0"), "it sends what the GPUs of a host exchange through the host's memory"),
    ("NCCL_SHM_DISABLE", "within", _ON, "what cannot go from GPU to GPU then goes through the network card"),
    ("NCCL_IB_DISABLE", "between", _ON, "hosts then exchange through sockets, not InfiniBand or RoCE"),
    ("NCCL_NET", "between", ("Socket", "socket"), "hosts then exchange through sockets, not InfiniBand or RoCE"),
    ("NCCL_SOCKET_IFNAME", "between", (), "sockets then use that interface: is it the fast one?"),
    ("GLOO_SOCKET_IFNAME", "between", (), "gloo then uses that interface: is it the fast one?"),
    ("NCCL_PROTO", "both", ("LL",), "of each eight bytes on the link four are flags"),
    ("NCCL_MAX_NCHANNELS", "both", (), "few channels do not fill a link"),
    ("NCCL_MAX_CTAS", "both", (), "few channels do not fill a link"),
)


@across_ranks
def links(
    matched: Maybe[Frame] = maybe(matched), bandwidth: Maybe[Frame] = maybe(bandwidth), job: Job = needs(JOB)
) -> pd.DataFrame:
    """Return the rows of `bandwidth` that judge a link, the most exposed first.

    With each and took_ns (the medians of bytes and transfer of one; busbw is theirs), on (the ranks, in order), of_peak
    (share of the link's peak), alike_ns (what one takes in the other groups like it) and better_ns: what one would take
    at a fast link, of those that are slow. NaN: unknown, or not slow. Raises NotMeasured where there is none, transfer
    cannot be separated from waiting, or there is nothing to compare with.
    """
    if settings.through_host(job):
        raise NotMeasured(
            "gloo sends what is on a GPU through the host, and the trace times no such link; NCCL would not"
        )
    pairs, frame = matched.get(), bandwidth.get()
    if (frame["size"] < 0).all():
        raise NotMeasured(NO_SIZES)
    key = ["collective", "members", "ranks", "size"]
    each = pairs.assign(dur_ns=pairs["end_ns"] - pairs["start_ns"], ranks=pairs["wanted"]).groupby("instance")
    one = each.agg({"collective": "first", "members": "first", "ranks": "first", "bytes": "max", "dur_ns": "min"})
    one = one.assign(size=size_classes(one["bytes"]))
    frame = frame.merge(one.groupby(key, as_index=False).agg(each=("bytes", "median"), took_ns=("dur_ns", "median")))
    often = frame["collective"].isin(JUDGED) & (frame["matched"] >= LEAST_COUNT)
    frame = frame[often & (frame["each"] >= LARGE_BYTES) & (frame["took_ns"] > 0)].reset_index(drop=True)
    if not len(frame):
        raise NotMeasured(
            f"no collective of {size(LARGE_BYTES)} or more was traced {LEAST_COUNT} times: smaller ones do not show it"
        )
    factor = [bus_factor(kind, n) for kind, n in zip(frame["collective"], frame["ranks"], strict=True)]
    on = [tuple(map(int, m.split(","))) if m else tuple(range(job.world_size)) for m in frame["members"]]
    busbw = frame["each"] * factor / frame["took_ns"] * 1e9
    of_peak = busbw / frame["peak"].where(frame["each"] >= LARGE_FOR_PEAK)
    alike = _alike(frame.assign(placed=[_placed(job, ranks) for ranks in on]))
    frame = frame.assign(busbw=busbw, on=pd.Series(on), of_peak=of_peak, alike_ns=alike)
    frame = frame[frame[["of_peak", "alike_ns"]].notna().any(axis=1)]
    if not len(frame):
        raise NotMeasured("what this link can carry is not known, and there is no similar group to compare with")
    at_peak = (frame["of_peak"] / ATTAINABLE * frame["took_ns"]).where(frame["of_peak"] < SLOW_OF_PEAK)
    as_others = frame["alike_ns"].where(frame["took_ns"] > SLOWER * frame["alike_ns"])
    frame = frame.assign(better_ns=np.fmin(at_peak, as_others))
    return frame.sort_values("exposed_ns", ascending=False, ignore_index=True)


def _placed(job: Job, ranks: Sequence[int]) -> str:
    """Describe how a group's ranks lie among all ranks and hosts; "" where a host is unknown."""
    hosts = [settings.host(job, r) for r in ranks]
    order = {h: n for n, h in enumerate(dict.fromkeys(hosts))}
    return f"{[r - ranks[0] for r in ranks]} on {[order[h] for h in hosts]}" if all(hosts) else ""


def _alike(frame: pd.DataFrame) -> pd.Series[float]:
    """Return for each row how long the median of the other groups like it takes for as many bytes, ns; NaN: none is.

    One that exchanges more is not taken to be faster with less, for a start takes as long.
    """
    each, took, members = (frame[name].to_numpy() for name in ("each", "took_ns", "members"))
    alike = np.full(len(frame), np.nan)
    for at in frame[frame["placed"] != ""].groupby(["collective", "placed"]).groups.values():
        for i in at:
            ratio = each[i] / each[at]
            others = (members[at] != members[i]) & (ratio >= 1 / ALIKE_SIZE) & (ratio <= ALIKE_SIZE)
            if others.any():
                alike[i] = np.median((took[at] * np.maximum(ratio, 1.0))[others])
    return pd.Series(alike)


def slowing_settings(job: Job, ranks: Sequence[int], across_hosts: bool) -> Iterator[Change]:
    """Return the removal of each setting that turns a fast path between some ranks off."""
    for name, where, values, does in _SETTINGS:
        is_set = {r: str((job.facts[r].get("env") or {}).get(name) or "") for r in job.ranks}
        value = next((is_set[r] for r in ranks if is_set[r] and (not values or is_set[r] in values)), "")
        if value and where in ("both", "between" if across_hosts else "within"):
            others = [r for r in job.ranks if r not in ranks]
            alone = ", only on these ranks" if others and all(is_set[r] != value for r in others) else ""
            yield Change(f"unset `{name}` (is {value}{alone}): {does}", (Setting(name, value),))
