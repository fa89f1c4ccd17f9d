"""A slow link: large collectives run far below its peak, or far slower than in similar groups.

GPUs that could talk over NVLink exchange through the host's memory; hosts exchange through a socket although there is
InfiniBand; one card, cable or slot carries half as much as the others. Every collective on the link is slow, and
nothing fails.

Needs the traces of a whole process group, with the sizes of its collectives: the transfer is the time that the last
rank to arrive spends in one. The rule judges all-reduces, all-gathers and reduce-scatters, in which every rank sends
and receives the same amount. Below 1 MiB they show the start and not the link. The peak is known for NVLink within a
host, and collectives of 16 MiB or more are compared with it. Otherwise groups are compared that lie on as many hosts in
the same way and exchange alike. For a single group between hosts or over PCIe the peak is not known, and the rule
reports nothing.
NVIDIA's nccl-tests measure a link by itself: within a host of N GPUs `all_reduce_perf -b 8 -e 1G -f 2 -g N`; between
two under SLURM, built with MPI=1, `srun -N 2 --ntasks-per-node N all_reduce_perf -b 8 -e 1G -f 2 -g 1`. Their `busbw`
is what the report's table of collectives calls bus bandwidth: compare it at the same size.

Saving: the exposed transfer of the slow collectives at three quarters of the link's peak, or at the other groups'
speed; then the step is replayed, as no rank gets faster than the next slowest. Hidden transfer and waiting for a late
rank do not count. In pipelines, the bubbles of the other stages shrink by as much. If collectives queue behind each
other, the gain is larger.

What to change: settings that turn the fast path off (`NCCL_P2P_DISABLE`, `NCCL_IB_DISABLE`); then the hardware.
`NCCL_DEBUG=INFO` shows the path that was taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlprof.analysis import settings
from dlprof.analysis.communication.bandwidth import ATTAINABLE, SLOW_OF_PEAK, links, slowing_settings
from dlprof.analysis.communication.exchange_plans import transfer_noise
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.pipeline.pipes import pipelines
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.savings import own_time, saving_in_pipelines
from dlprof.result import Change, Panel
from dlprof.units import UNKNOWN, digits, duration, listed, percent, ranks_named, size

# The most rows of a table that a reader looks at.
MOST_ROWS = 12


def check(
    links: Frame = needs(links),
    own_time: Maybe[Frame] = maybe(own_time),
    breakdown: Maybe[Frame] = maybe(breakdown),
    pipelines: Maybe[Frame] = maybe(pipelines),
    transfer_noise: Maybe[float] = maybe(transfer_noise),
    job: Job = needs(JOB),
) -> Estimate:
    slow = links[links["better_ns"].notna()]
    if not len(slow):
        if links["of_peak"].notna().any():
            return nothing(f"large collectives reach {percent(links['of_peak'].min())} of the link's peak or more")
        slowest = digits(float((links["took_ns"] / links["alike_ns"]).max()))
        return nothing(f"the slowest group takes {slowest} × as long as those like it")
    removed = dict.fromkeys(job.ranks, 0.0)
    for row in slow.to_dict("records"):
        for rank in row["on"]:
            removed[rank] += row["exposed_ns"] * max(0.0, 1 - row["better_ns"] / row["took_ns"])
    gain = saving_in_pipelines(own_time.get(), removed, pipelines.or_none(), breakdown.get())
    owner = _owner(job, links, slow)
    return Estimate(
        saving_ns=gain,
        by_rank_ns=removed,
        noise_ns=gain * transfer_noise.get(),
        loses=f"is lost on the slow link of {owner}",
        seen=(slow, owner),
    )


def explain(estimate: Estimate, links: Frame = needs(links), job: Job = needs(JOB)) -> Explanation:
    slow, owner = estimate.seen
    worst = slow.iloc[0]
    below = bool((slow["of_peak"] < SLOW_OF_PEAK).any())
    pace = f"{percent(ATTAINABLE)} of the link's peak" if below else "the pace of the groups like it"
    fewer = " GPUs that are joined by some of their links only reach less." if below else ""
    return Explanation(
        title=f"The link of {owner} is slow",
        summary=f"{worst['collective']} of {size(worst['each'])} between {ranks_named(worst['on'])} takes"
        f" {duration(worst['took_ns'])}, {size(worst['busbw'])}/s on the bus: {_against(worst)}.",
        changes=_changes(job, slow),
        evidence=_evidence(links),
        sure=f"Estimated as the exposed transfer at {pace}; what is hidden, and waiting, is not counted.{fewer}",
    )


def _against(row: Mapping[str, Any]) -> str:
    """Say what a slow one is held against."""
    if row["of_peak"] < SLOW_OF_PEAK:
        return f"{percent(row['of_peak'])} of what their NVLinks carry"
    return f"others like it take {duration(row['alike_ns'])}"


def _owner(job: Job, links: Frame, slow: Frame) -> str:
    """Name the host that all slow groups have in common and no other has; else the ranks with most exposed."""
    if slow["members"].nunique() > 1 and {r for ranks in slow["on"] for r in ranks} == set(job.ranks):
        return "all ranks"
    common = set.intersection(*({settings.host(job, r) for r in ranks} for ranks in slow["on"]))
    fine = {settings.host(job, r) for ranks in links["on"][~links["members"].isin(slow["members"])] for r in ranks}
    left = common - fine
    if fine and len(left) == 1 and "" not in left:
        return f"host {left.pop()}"
    return ranks_named(slow["on"].iloc[0]) + (" and others" if slow["members"].nunique() > 1 else "")


def _changes(job: Job, slow: Frame) -> tuple[Change, ...]:
    across = any(len({settings.host(job, r) for r in ranks}) > 1 for ranks in slow["on"])
    found = tuple(slowing_settings(job, sorted({r for ranks in slow["on"] for r in ranks}), across))
    if settings.on_cpu(job):
        return (*found, change("look at the network and the cores of these ranks' hosts: what else uses them"))
    if across:
        path = "`NCCL_DEBUG=INFO`: does NCCL take `NET/IB` or `NET/Socket`? Then each card's rate (`ibstat`)"
        return (*found, change(path, NCCL_DEBUG=(None, "INFO")))
    path = "`NCCL_DEBUG=INFO`: do these ranks exchange `via P2P`, or `via SHM`, the host's memory?"
    how = "`nvidia-smi topo -m` and `nvidia-smi nvlink --status` on their host: how GPUs are joined, which links are up"
    return (*found, change(path, NCCL_DEBUG=(None, "INFO")), change(how))


def _evidence(links: Frame) -> Panel:
    columns = {
        "collective": "collective",
        "on": "ranks",
        "each": "size_bytes",
        "count": "calls a step",
        "took_ns": "transfer of one_ns",
        "alike_ns": "others like it_ns",
        "busbw": "on the bus, a second_bytes",
        "of_peak": "link's peak_share",
        "exposed_ns": "exposed a step_ns",
    }
    shown = links.sort_values(["better_ns", "exposed_ns"], ascending=[True, False])
    shown = shown.assign(on=[listed(on) for on in shown["on"]])
    note = f"Size and transfer are the medians; {UNKNOWN}: not known."
    note += f" {MOST_ROWS} of {len(links)}." if len(links) > MOST_ROWS else ""
    return table("Large collectives and their links", shown, columns, MOST_ROWS, note)


RULE = Rule("A slow link", check, explain, saves_from=("communication", "pipeline_bubble"))
