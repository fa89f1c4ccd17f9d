"""Ranks wait in a collective that other ranks of its group never entered, or that never ends.

A collective ends when all ranks of its process group have come. Where one takes another branch, has fewer batches, or
has died, the others wait until the timeout ends the job. PyTorch's flight recorder keeps the last collectives of each
rank with their state and the line that issued them.

Needs the dumps of the ranks, a file a rank: `TORCH_FR_BUFFER_SIZE=2000` (before torch 2.8
`TORCH_NCCL_TRACE_BUFFER_SIZE`) and `TORCH_NCCL_DUMP_ON_TIMEOUT=1` make NCCL write them, `TORCH_FR_DUMP_TEMP_FILE` names
them. Give dlprof their folder. A rank without a dump is not blamed: it may have died, or its file may be elsewhere.

Saving: none of a step. The job could not go on, so the report lists it before any saving. If a missing rank itself
waits in another collective, that one comes first.

What to change: the line that the missing ranks did not reach. Each must issue the same collectives in the same order:
no collective in a branch that depends on the rank's own data, as many batches on each rank (`drop_last=True`,
`DistributedSampler`), `with model.join():` where they differ.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.communication.recorder import (
    NO_DUMP,
    Hang,
    any_dump,
    hangs,
    has_one_rank,
    moment,
    rank_places,
    whole_calls,
)
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panels.communication import places_table
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Change
from dlprof.units import count, duration, listed, ranks_named


def check(
    whole_calls: Maybe[Frame] = maybe(whole_calls), hangs: Maybe[tuple[Hang, ...]] = maybe(hangs), job: Job = needs(JOB)
) -> Estimate:
    """Find the ranks that others wait for in a collective."""
    if not any_dump(whole_calls):
        if has_one_rank(job):
            raise DoesNotApply("one rank waits for no other")
        raise NotMeasured(whole_calls.why() if whole_calls.broke else NO_DUMP)
    found = hangs.get()
    if not found:
        calls = whole_calls.get()
        many = calls["rank"].nunique()
        return nothing(
            f"no rank waits in a collective: {count(many, 'dump')} with {count(len(calls), 'call')}", "failure"
        )
    first = found[0]
    if first.mixed and not first.missing:
        return nothing(f"{first.named} is another collective on some ranks: see mismatched_collectives", "failure")
    guilty = first.missing or first.unknown or first.waiting
    return Estimate(scope="failure", by_rank_ns=dict.fromkeys(guilty, 1.0), seen=found)


def explain(estimate: Estimate, rank_places: Frame = needs(rank_places)) -> Explanation:
    """Say who never came, who waits where and since when, and where the missing ranks were seen last."""
    found: tuple[Hang, ...] = estimate.seen
    first = found[0]
    since = f" since {moment(first.since_ns)}" if first.since_ns > 0 else ""
    came, wait = ranks_named(first.waiting), "waits" if len(first.waiting) == 1 else "wait"
    if first.missing:
        who = ranks_named(first.missing).capitalize()
        title = f"{who} never entered {first.op} #{first.sequence}"
        did = "left it unfinished, issued at " + moment(first.since_ns) if first.left else f"{wait} in it{since}"
        verdict = f"{who} never entered {first.named}; {came} {did}."
    elif first.unknown:
        who = ranks_named(first.unknown)
        title = f"{first.op} #{first.sequence} waits, and {who} left no dump"
        verdict = f"{came.capitalize()} {wait} in {first.named}{since}; {who} left no dump."
    else:
        title = f"{first.op} #{first.sequence} does not end, though all its ranks entered it"
        many = count(len(first.waiting), "rank")
        verdict = f"{many} of {first.group} entered {first.op} #{first.sequence}{since}, and it does not end."
    last = rank_places[rank_places["rank"].isin(first.missing)]
    more = [f"{ranks_named(h.waiting)} {'waits' if len(h.waiting) == 1 else 'wait'} in {h.named}" for h in found[1:4]]
    at = f" at {first.site}" if first.site else ""
    beyond = f" Besides, {'; '.join(more)}." if more else ""
    lost = (
        f" {ranks_named(first.unknown).capitalize()} of the group left no dump."
        if first.unknown and first.missing
        else ""
    )
    limit = f" Its timeout is {duration(first.timeout_ms * 1e6)}." if first.timeout_ms > 0 else ""
    return Explanation(
        title=title,
        summary=f"The {first.op} was issued{at} by {ranks_named(first.waiting)}."
        f"{_seen(last)}{_running(first)}{lost}{beyond}{limit}",
        verdict=verdict,
        changes=_changes(first, last),
        evidence=places_table(rank_places),
        sure="Read from the recorders' dumps, which do not say when they were written: of a job that was not stopped, a"
        " collective that was under way looks the same.",
    )


def _seen(last: pd.DataFrame) -> str:
    """Say where the missing ranks were seen last, one sentence for each place."""
    sentences = []
    for (doing, op, number, named, site), of in last.groupby(["doing", "op", "sequence", "named", "site"], sort=False):
        at = f" at {site}" if site else ""
        what = "issued" if doing == "last issued" else "waits in" if len(of) == 1 else "wait in"
        when = " last" if doing == "last issued" else ""
        sentences.append(f" {ranks_named(of['rank']).capitalize()}{when} {what} {op} #{number} of {named}{at}.")
    return "".join(sentences[:3])


def _running(first: Hang) -> str:
    """Say on which of several waiting ranks the device runs it: the others' devices are busy with something else."""
    behind = set(first.waiting) - set(first.began)
    if first.missing or not first.began or not behind:
        return ""
    return f" It runs on the devices of ranks {listed(first.began)}, and is only queued on {ranks_named(behind)}."


def _changes(first: Hang, last: pd.DataFrame) -> tuple[Change, ...]:
    if first.missing:
        sites = [site for site in last["site"].drop_duplicates() if site][:2]
        after = f" after {' and '.join(f'`{site}`' for site in sites)}" if sites else ""
        return (
            change(f"find why {ranks_named(first.missing)} took another way{after}: a branch, fewer batches, an end"),
            change(
                "as many batches on each rank: `drop_last=True` with `DistributedSampler`; else `with model.join():`"
            ),
        )
    if first.unknown:
        who = ranks_named(first.unknown)
        return (
            change(
                f"look how {who} ended: the log, `dmesg`, the launcher's exit code; or add the dump that is missing"
            ),
        )
    return (
        change("look at the devices that have not begun it: `nvidia-smi`, `NCCL_DEBUG=INFO`, the network's counters"),
        change("`py-spy dump --pid PID` of a rank on which it is only queued"),
    )


RULE = Rule("Collectives that never end", check, explain)
