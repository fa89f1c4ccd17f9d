"""Another thread of the process computes in Python, and training waits for the interpreter.

One thread at a time runs Python. A thread that computes keeps the interpreter for five milliseconds at a time, and
training loses it at each of its operators: a step of fifty operators can take a quarter of a second longer. Monitors
that poll, progress bars, own prefetching threads.

Needs stacks (py-spy), in which another thread is seen at work in lines of the user's, not waiting or asleep, and what
the kernel counts of the training thread: how long it neither ran nor was ready to run. Waiting for the loader does not
count. Where the kernel's counts are too few, as in a short job, a trace of the CPU says for how long no operator ran. A
job on a GPU waits for its device as well: the thread is named there, and no saving.

Saving: all of that time, the most that a thread which does not compute gives; a bound where the trace says it.

What to change: let the thread sleep between two looks (`time.sleep(1)`, `event.wait(1)`), or do its work in another
process (`multiprocessing.Process`, a DataLoader's workers), or in a library that lets the interpreter go (NumPy,
torch).
"""

from __future__ import annotations

import pandas as pd

from dlprof import schema
from dlprof.analysis import idioms, settings
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, by_rank, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.parts import ON_CPU, HeldUp, held_up
from dlprof.analysis.host.stacks import FRAME, LEAST_SAMPLES, is_own, shown
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import texts_of
from dlprof.analysis.step.breakdown import steady_usage
from dlprof.analysis.timeline.steady import ENOUGH, standard_error, steady_steps
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.result import Place
from dlprof.units import duration, percent, short

# A thread is busy that is at work in this share of the samples of the training thread.
BUSY_SHARE = 0.3

# Idioms of lines that wait, and compute nothing.
_WAITING = ("waits_by_sleeping", "waits_for_a_lock")


@per_rank
def busy_lines(stacks: Frame = needs(schema.STACKS), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return the user's lines in which other threads of a rank are at work: function, file, line, text, samples, of.

    `of`: the samples of the training thread in the same time. A thread is at work where the innermost frame is the
    user's own and does not sleep or wait: what waits in Python stands in a function of Python's library. Raises
    NotMeasured where too few stacks were seen.
    """
    ours = stacks[stacks["profile"] == ""]
    of = int(ours.loc[ours["role"] == "main", "samples"].sum())
    if of < LEAST_SAMPLES:
        raise NotMeasured("too few stacks of the training thread were seen")
    texts = texts_of(rank)
    mine = ours[ours["role"] == "thread"]
    found: dict[tuple[str, str, int], int] = {}
    for stack, n in zip(mine["stack"].astype(str), mine["samples"], strict=True):
        frame = FRAME.fullmatch(stack.rpartition(";")[2])
        if frame is None or not is_own(frame[2]):
            continue
        place = frame[1], frame[2], int(frame[3])
        known = idioms.known(texts.get(place[1:], ""), (), "rest")
        if known is None or known.name not in _WAITING:
            found[place] = found.get(place, 0) + int(n)
    directory = str(rank.facts.get("directory") or "")
    rows = [
        (f, file.removeprefix(directory), at, texts.get((file, at), ""), n, of) for (f, file, at), n in found.items()
    ]
    table = pd.DataFrame(rows, columns=["function", "file", "line", "text", "samples", "of"])
    return table.sort_values("samples", ascending=False, ignore_index=True).head(20)


@per_rank
def idle_thread(steady_usage: Frame = needs(steady_usage), steady_steps: Frame = needs(steady_steps)) -> pd.DataFrame:
    """Return how long the training thread neither ran nor could run, without waiting for its loader (one row).

    Columns: ns and its standard error noise_ns, of the mean steady step. Raises NotMeasured where the kernel did not
    count it.
    """
    usage = steady_usage[steady_usage["thread_ns"] >= 0]
    if len(usage) < ENOUGH or not len(steady_steps):
        raise NotMeasured("how long the training thread ran was not recorded")
    share = 1 - (usage["thread_ns"] + usage["delay_ns"]) / usage["dur_ns"].clip(lower=1)
    step = float(steady_steps["dur_ns"].mean())
    waits = float(steady_steps["fetch_ns"].clip(lower=0).mean())
    whole = float((share * usage["dur_ns"]).sum() / usage["dur_ns"].sum())
    noise = standard_error(share.to_numpy(dtype=float)) * step
    return pd.DataFrame([{"ns": max(whole * step - waits, 0.0), "noise_ns": noise}])


def check(
    busy_lines: Frame = needs(busy_lines),
    idle_thread: Maybe[Frame] = maybe(idle_thread),
    held_up: Maybe[HeldUp] = maybe(held_up),
    job: Job = needs(JOB),
) -> Estimate:
    seen = busy_lines.groupby("rank").agg(samples=("samples", "sum"), of=("of", "first"))
    busy = seen[seen["samples"] >= BUSY_SHARE * seen["of"]]
    if not len(busy):
        return nothing("no other thread of the process was seen at work in lines of the script")
    loses = "is waiting for the interpreter, in which another thread computes"
    held = held_up.or_none()
    if idle_thread.or_none() is None and held is not None and held.where == ON_CPU:
        gone = {rank: ns for rank, ns in held.by_rank_ns.items() if rank in busy.index}
        return Estimate(gone_ns=gone, loses=loses, seen=False)
    idle = idle_thread.get()
    idle = idle[idle["rank"].isin(busy.index)]
    return Estimate(
        gone_ns=by_rank(idle, "ns"),
        noise_ns=float(idle["noise_ns"].max()),
        loses=loses,
        seen=True,
        unknown="" if settings.on_cpu(job) else "a thread waits for its device as well, which is not told apart",
    )


def explain(
    estimate: Estimate, busy_lines: Frame = needs(busy_lines), mean_step_ns: float = needs(mean_step_ns)
) -> Explanation:
    mine = estimate.rows(busy_lines)
    (top,) = mine.head(1).to_dict("records")
    name = shown(str(top["function"]), str(top["file"]), int(top["line"]))
    source = f" `{short(str(top['text']), 80)}`" if top["text"] else ""
    share = mine["samples"].sum() / float(top["of"])
    counted = "counted by the kernel" if estimate.seen else "the time in which no operator ran in the trace"
    return Explanation(
        title="Another thread keeps the interpreter",
        summary=f"Beside the training thread of rank {estimate.worst}, another one is at work in {name}{source} in"
        f" {percent(min(share, 1.0))} of the samples; the training thread stands still for"
        f" {duration(estimate.by_rank_ns[estimate.worst])} of a step of {duration(mean_step_ns)}.",
        changes=(
            change(f"let the thread sleep between two looks (`time.sleep(1)`, `event.wait(1)`): {name}"),
            change("or do its work in another process: `multiprocessing.Process`, a DataLoader's workers"),
        ),
        evidence=table(
            f"Lines of other threads at work, rank {estimate.worst}",
            mine.assign(share=mine["samples"] / mine["of"]),
            {"function": "function", "file": "file", "line": "line", "share": "share of the samples"},
        ),
        where=(Place(str(top["file"]), int(top["line"]), str(top["function"])),),
        at_most=not estimate.seen,
        sure=f"How long the training thread stands still is {counted}; that it waits for the interpreter is"
        " concluded from the other thread's stacks. The saving is all of it gone; each turn of"
        " another thread costs caches besides, so that more may be gained.",
    )


RULE = Rule(
    "A thread that computes in Python", check, explain, saves_from=("computation", "optimizer_host", "host", "other")
)
