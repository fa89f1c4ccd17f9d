"""A link that is slow: large collectives far below what it can carry, or far below the pace of other groups like it.

GPUs that could talk over NVLink exchange through the host's memory; hosts through a socket where there is InfiniBand;
one card, cable or slot carries half of what its neighbours do. Every collective on it is slow, and nothing fails.

Needs the traces of a whole process group, with the sizes of its collectives: transfer is what the last to come spends
in one. Judged are all-reduces, all-gathers and reduce-scatters, in which every rank gives and takes alike; smaller ones
than 1 MiB tell of starting and not of a link. What the link carries is known of NVLink within a host, and asked of
collectives of 16 MiB or more. Else groups are compared that are placed alike on as many hosts and exchange alike.

Saving: the exposed transfer of the slow ones, shorter by as much as they would be at three quarters of the link's peak,
or at the others' pace; then the step replayed, for no rank gets faster than the next slowest. What computation hides
and what is waiting for a late rank is not counted. Where collectives queue behind each other, more is gained.

What to change: settings that turn the fast path off (`NCCL_P2P_DISABLE`, `NCCL_IB_DISABLE`); then the hardware.
`NCCL_DEBUG=INFO` tells the path that was taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.communication.bandwidth import CLASSES, bus_factor, size_classes
from dlprof.analysis.communication.exchange_plans import gain_noise
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import rows
from dlprof.analysis.step.savings import saving
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel, Setting
from dlprof.units import UNKNOWN, digits, duration, percent, size

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

# Links fail by halves: one port of two, half of a slot's lanes. Half way there is more than neighbours' traffic.
SLOWER = 1.5

# Groups are alike if their collectives are as large, to a factor; and a slow one is slow so many times.
ALIKE_SIZE = 2.0
LEAST_COUNT = 3

# More than this nobody reads.
MOST_ROWS = 12
MOST_NAMED = 8

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


def check(
    matched: Maybe[pd.DataFrame],
    bandwidth: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    transfer_noise: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Hold the pace of large collectives against the link's peak and against the groups placed alike."""
    frame = _large(matched, bandwidth, job)
    of_peak = frame["busbw"] / frame["peak"].where(frame["each"] >= LARGE_FOR_PEAK)
    frame = frame.assign(of_peak=of_peak, alike_ns=_alike(frame))
    judged = frame[frame["of_peak"].notna() | frame["alike_ns"].notna()]
    if not len(judged):
        raise NotMeasured("neither what the link can carry is known, nor another group that is placed and sized alike")
    below, behind = judged["of_peak"] < SLOW_OF_PEAK, judged["took_ns"] > SLOWER * judged["alike_ns"]
    at_peak = judged["of_peak"] / ATTAINABLE * judged["took_ns"]
    better = pd.concat([at_peak.where(below), judged["alike_ns"].where(behind)], axis=1).min(axis=1)
    judged = judged.assign(better_ns=better).sort_values("exposed_ns", ascending=False, ignore_index=True)
    slow = judged[judged["better_ns"].notna()]
    if not len(slow):
        return nothing(_fine(judged))
    removed, who = _removed(job, slow), _who(job, judged, slow)
    gain = saving(own_time.get(), removed)
    return Estimate(
        saving_ns=gain,
        by_rank_ns=removed,
        noise_ns=gain_noise(transfer_noise.get(), gain),
        loses=f"is lost on the slow link of {who}",
        explain=lambda: _explain(job, judged, slow, who),
    )


def _explain(job: Job, judged: pd.DataFrame, slow: pd.DataFrame, who: str) -> Explanation:
    worst = slow.iloc[0]
    against = (
        f"{percent(worst['of_peak'])} of what their NVLinks carry"
        if worst["of_peak"] < SLOW_OF_PEAK
        else f"others like it take {duration(worst['alike_ns'])}"
    )
    below = bool((slow["of_peak"] < SLOW_OF_PEAK).any())
    pace = f"{percent(ATTAINABLE)} of the link's peak" if below else "the pace of the groups like it"
    fewer = " GPUs that are joined by some of their links only reach less." if below else ""
    return Explanation(
        title=f"The link of {who} is slow",
        summary=f"{worst['collective']} of {size(worst['each'])} between {_named(worst['on'])} takes"
        f" {duration(worst['took_ns'])}, {size(worst['busbw'])}/s on the bus: {against}.",
        changes=_changes(job, slow),
        evidence=_evidence(judged),
        sure=f"Estimated as the exposed transfer at {pace}; what is hidden, and waiting, is not counted.{fewer}",
    )


def _large(matched: Maybe[pd.DataFrame], bandwidth: Maybe[pd.DataFrame], job: Job) -> pd.DataFrame:
    """Return the rows of `bandwidth` by which a link can be judged.

    With each and took_ns (the medians of bytes and transfer of one; busbw is theirs), on (the ranks, in order) and
    placed. Raises NotMeasured where there is none, or transfer is not told from waiting.
    """
    try:
        pairs = matched.get()
    except NotMeasured:
        if _through_host(job):
            raise NotMeasured(
                "gloo sends what is on a GPU through the host, and the trace times no such link; NCCL would not"
            ) from None
        raise
    frame = bandwidth.get()
    if (frame["size"] < 0).all():
        raise NotMeasured("the trace does not tell how large its collectives are")
    each = pairs.assign(dur_ns=pairs["end_ns"] - pairs["start_ns"]).groupby("instance")
    one = each.agg(
        {"collective": "first", "members": "first", "wanted": "first", "bytes": "max", "dur_ns": "min"}
    ).rename(columns={"wanted": "ranks"})
    one = one.assign(size=size_classes(one["bytes"]))
    key = ["collective", "members", "ranks", "size"]
    median = one.groupby(key).agg(each=("bytes", "median"), took_ns=("dur_ns", "median")).reset_index()
    frame = frame.merge(median, on=key)
    often = frame["collective"].isin(JUDGED) & (frame["matched"] >= LEAST_COUNT)
    frame = frame[often & (frame["each"] >= LARGE_BYTES) & (frame["took_ns"] > 0)]
    if not len(frame):
        raise NotMeasured(f"no collective of {size(LARGE_BYTES)} or more, {LEAST_COUNT} times or more, to judge it by")
    factor = [bus_factor(str(kind), int(n)) for kind, n in zip(frame["collective"], frame["ranks"], strict=True)]
    on = [tuple(map(int, m.split(","))) if m else tuple(range(job.world_size)) for m in frame["members"]]
    placed = [_placed(job, ranks) for ranks in on]
    busbw = frame["each"] * factor / frame["took_ns"] * 1e9
    return frame.assign(busbw=busbw, on=pd.Series(on, index=frame.index), placed=placed).reset_index(drop=True)


def _through_host(job: Job) -> bool:
    return any(f.get("backend") == "gloo" and (f.get("device") or {}).get("type") == "cuda" for f in job.facts.values())


def _placed(job: Job, ranks: Sequence[int]) -> str:
    """Describe how a group's ranks lie among all ranks and hosts; "" where a host is not told."""
    hosts = [settings.host(job, r) for r in ranks]
    order = {h: n for n, h in enumerate(dict.fromkeys(hosts))}
    return f"{[r - ranks[0] for r in ranks]} on {[order[h] for h in hosts]}" if all(hosts) else ""


def _alike(frame: pd.DataFrame) -> pd.Series[float]:
    """Return for each row how long the median of the other groups like it takes for as many bytes, ns; NaN: none is.

    One that exchanges more is not taken to be faster with less, for a start takes as long.
    """
    each, took, members = (frame[name].to_numpy() for name in ("each", "took_ns", "members"))
    alike = np.full(len(frame), np.nan)
    placed = frame.assign(at=np.arange(len(frame)))[frame["placed"] != ""]
    for _, group in placed.groupby(["collective", "placed"]):
        at = group["at"].to_numpy()
        for i in at:
            ratio = each[i] / each[at]
            others = (members[at] != members[i]) & (ratio >= 1 / ALIKE_SIZE) & (ratio <= ALIKE_SIZE)
            if others.any():
                alike[i] = np.median((took[at] * np.maximum(ratio, 1.0))[others])
    return pd.Series(alike, index=frame.index)


def _removed(job: Job, slow: pd.DataFrame) -> dict[int, float]:
    """Return what each rank's own time is shorter by at the better pace, ns."""
    removed = dict.fromkeys(job.ranks, 0.0)
    for row in slow.to_dict("records"):
        for rank in row["on"]:
            removed[rank] += row["exposed_ns"] * max(0.0, 1 - row["better_ns"] / row["took_ns"])
    return removed


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))}{', …' if len(ranks) > MOST_NAMED else ''}"


def _who(job: Job, judged: pd.DataFrame, slow: pd.DataFrame) -> str:
    """Name the host that all slow groups have in common and no other has; else the ranks, those of the dearest."""
    if slow["members"].nunique() > 1 and {r for ranks in slow["on"] for r in ranks} == set(job.ranks):
        return "all ranks"
    common = set.intersection(*({settings.host(job, r) for r in ranks} for ranks in slow["on"]))
    fine = {settings.host(job, r) for ranks in judged["on"][~judged["members"].isin(slow["members"])] for r in ranks}
    left = common - fine
    if fine and len(left) == 1 and "" not in left:
        return f"host {left.pop()}"
    return _named(slow["on"].iloc[0]) + (" and others" if slow["members"].nunique() > 1 else "")


def _fine(judged: pd.DataFrame) -> str:
    if judged["of_peak"].notna().any():
        return f"large collectives reach {percent(float(judged['of_peak'].min()))} of the link's peak or more"
    slowest = float((judged["took_ns"] / judged["alike_ns"]).max())
    return f"the slowest group takes {digits(slowest)} × as long as those like it"


def _changes(job: Job, slow: pd.DataFrame) -> tuple[Change, ...]:
    ranks = sorted({r for members in slow["on"] for r in members})
    across = any(len({settings.host(job, r) for r in members}) > 1 for members in slow["on"])
    changes = []
    for name, where, values, does in _SETTINGS:
        is_set = {r: str((job.facts[r].get("env") or {}).get(name) or "") for r in job.ranks}
        value = next((is_set[r] for r in ranks if is_set[r] and (not values or is_set[r] in values)), "")
        if value and where in ("both", "between" if across else "within"):
            others = [r for r in job.ranks if r not in ranks]
            alone = ", only on these ranks" if others and all(is_set[r] != value for r in others) else ""
            changes.append(Change(f"unset `{name}` (is {value}{alone}): {does}", (Setting(name, value),)))
    if settings.on_cpu(job):
        return (*changes, change("look at the network and the cores of these ranks' hosts: what else uses them"))
    if across:
        path = "`NCCL_DEBUG=INFO`: does NCCL take `NET/IB` or `NET/Socket`? Then each card's rate (`ibstat`)"
        return (*changes, change(path, NCCL_DEBUG=(None, "INFO")))
    path = "`NCCL_DEBUG=INFO`: do these ranks exchange `via P2P`, or `via SHM`, the host's memory?"
    links = (
        "`nvidia-smi topo -m` and `nvidia-smi nvlink --status` on their host: how GPUs are joined, which links are up"
    )
    return (*changes, change(path, NCCL_DEBUG=(None, "INFO")), change(links))


def _evidence(judged: pd.DataFrame) -> Panel:
    columns = {
        "collective": "collective",
        "on": "ranks",
        "each": "size_bytes",
        "count": "a step",
        "took_ns": "transfer of one_ns",
        "alike_ns": "others like it_ns",
        "busbw": "on the bus, a second_bytes",
        "of_peak": "link's peak_share",
        "exposed_ns": "exposed a step_ns",
    }
    shown = judged.sort_values(["better_ns", "exposed_ns"], ascending=[True, False]).head(MOST_ROWS)
    shown = shown.assign(on=[_named(on).removeprefix("ranks ") for on in shown["on"]])[list(columns)]
    note = f"Size and transfer are the medians; {UNKNOWN}: not known."
    note += "" if len(judged) <= MOST_ROWS else f" {MOST_ROWS} of {len(judged)}."
    return Panel("table", "Large collectives and their links", rows(shown), tuple(columns.values()), note=note)


RULE = Rule(
    "slow_link",
    "A slow link",
    check,
    saves_from=("communication",),
)
