"""A job that trains on the CPU computes with fewer threads than it has cores, and the others are idle.

Launchers set one thread a process where they start several, and some where they start one (`accelerate launch`,
`torchrun`: OMP_NUM_THREADS=1). Products, convolutions and large operators are then computed on one core.

Needs a trace, and what is sampled of the host: cores count as idle where nobody used them, neither loader workers nor
other programs. A job on a GPU is not judged.

Saving: the operators that PyTorch splits over threads, shorter by what such operators usually gain: with twice the
threads products take 0.54 and others 0.62 of their time. The most that they could gain, as many times as there are more
threads, is given beside it: memory, caches and small pieces of work decide how much of it is reached. It is an
estimate, so try it before you keep it.

What to change: as many threads as a rank has cores to itself, less those that its loader workers use:
`OMP_NUM_THREADS` in the job's environment, or `torch.set_num_threads`.
"""

from __future__ import annotations

from dlprof.analysis.compute.cpu_work import by_threads, cpu_parts
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.machine.cores import line_of, spare_cores, threads_set_by
from dlprof.analysis.panel import named, table
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.units import count, digits, duration, percent

NOTABLE_SHARE = 0.05

_MOST_RANKS = 16

_COLUMNS = {
    "name": "",
    "threads": "threads",
    "cores": "cores to itself",
    "idle": "idle cores for each rank",
    "more": "threads with these",
    "expected_ns": "saves, as expected_ns",
    "most_ns": "saves at most_ns",
}


def check(spare_cores: Frame = needs(spare_cores), cpu_parts: Maybe[Frame] = maybe(cpu_parts)) -> Estimate:
    frame = spare_cores.assign(expected_ns=0.0, most_ns=0.0)
    few = frame[frame["more"] > frame["threads"]]
    if few.empty:
        row = frame.nlargest(1, "idle").iloc[0]
        return nothing(
            f"{count(row['threads'], 'thread')} and {count(row['cores'], 'core')} a rank, of which"
            f" {digits(row['idle'])} {'are' if row['idle'] != 1 else 'is'} idle"
        )
    if cpu_parts.or_none() is None:
        row = few.iloc[0]
        raise NotMeasured(
            f"{count(row['threads'], 'thread')} and {count(row['cores'], 'core')} a rank, and which operators more"
            f" threads would share is not known ({cpu_parts.why()}): try `torch.set_num_threads({row['more']:.0f})`"
        )
    parts = cpu_parts.get()
    gains = {
        int(r["rank"]): by_threads(parts, int(r["rank"]), r["more"] / r["threads"]) for r in few.to_dict("records")
    }
    for column in ("expected_ns", "most_ns"):
        frame[column] = [getattr(gains[r], column) if r in gains else 0.0 for r in frame["rank"]]
    return Estimate(
        gone_ns={rank: gain.expected_ns for rank, gain in gains.items()},
        noise_of=("computation",),
        loses="would be saved on cores that are idle",
        seen=frame,
    )


def explain(
    estimate: Estimate,
    own_time: Frame = needs(own_time),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Explanation:
    frame: Frame = estimate.seen
    row = estimate.rows(frame).iloc[0]
    line, by = line_of(job, estimate.worst, "threads"), threads_set_by(job, estimate.worst)
    threads, more = int(row["threads"]), int(row["more"])
    most = saving(own_time, by_rank(frame, "most_ns"))
    return Explanation(
        title="Cores are idle while few threads compute",
        summary=f"Rank {row['rank']:.0f} computes with {count(threads, 'thread')} and has"
        f" {count(row['cores'], 'core')} to itself; {digits(row['idle'])} of them {'is' if row['idle'] <= 1 else 'are'}"
        f" idle. {percent(row['most_ns'] / (1 - threads / more) / mean_step_ns)} of its step are operators that PyTorch"
        " splits over threads.",
        changes=(
            change(
                f"{'' if line else f'`OMP_NUM_THREADS={more}` in the job’s environment, or '}"
                f"`torch.set_num_threads({more})` (is {threads}{by})",
                num_threads=(threads, more),
            ),
        ),
        evidence=table("Threads and idle cores", named(frame), _COLUMNS, _MOST_RANKS),
        where=() if line is None else (line,),
        sure=f"Estimated from what such operators usually gain; at most {duration(most)} of the step, were they"
        f" {digits(more / threads)} times as fast. `dlprof try` measures it.",
    )


RULE = Rule(
    "Cores that nobody uses", check, explain, ("computation",), notable=NOTABLE_SHARE, only_with="cpu", weight=0.9
)
