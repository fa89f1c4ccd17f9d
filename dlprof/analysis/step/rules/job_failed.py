"""The job did not end as it should: an error that nobody caught, or a signal.

A loader's worker was killed or raised, /dev/shm is full, workers stand still, a collective timed out, a number was not
finite, a time limit or a preemption. Running out of memory is `out_of_memory`'s.

Needs a recorded run: the error that ended a rank (its type, the line, and what a library says of it; what the script's
own code says is not recorded), or the status with which the command ended.

Saving: none of a step. The job could not go on, so this finding comes before any saving. Of several ranks the one is
named whose error does not follow from that of another.

What to change: what the report says of this error; for one that is not known, its line.
"""

from __future__ import annotations

from dlprof.analysis import endings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.stacks import FRAME
from dlprof.analysis.memory.failures import memory_failures
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Place

# An exit code above this one stands for a signal, as shells say it.
_BY_SIGNAL = 128


def check(memory_failures: Maybe[Frame] = maybe(memory_failures), job: Job = needs(JOB)) -> Estimate:
    if not job.run.recorded:
        raise DoesNotApply("how the job ended is not in a trace")
    errors = {rank: job.facts[rank].get("error") or {} for rank in job.ranks}
    found = {rank: known for rank, error in errors.items() if error and (known := endings.of_error(error))}
    code, signal = job.run.exit.get("code"), job.run.exit.get("signal")
    memory = memory_failures.or_none()
    if memory is not None and len(memory):
        return nothing("the job ran out of memory: see out_of_memory", "failure")
    if found and code != 0:
        rank = min(found, key=lambda rank: (found[rank].follows, rank))
        return Estimate(scope="failure", by_rank_ns={rank: 1.0}, seen=(found[rank], errors[rank]))
    number = signal or (code - _BY_SIGNAL if isinstance(code, int) and code > _BY_SIGNAL else 0)
    if number in endings.SIGNALS and not any(errors.values()):
        return Estimate(scope="failure", by_rank_ns={job.ranks[0]: 1.0}, seen=(endings.SIGNALS[number], {}))
    if code is None and not signal:
        raise NotMeasured("how the command ended was not recorded")
    return nothing("no error that nobody caught, and no signal, ended the job", "failure")


def explain(estimate: Estimate, job: Job = needs(JOB)) -> Explanation:
    failed, error = estimate.seen
    rank, what = estimate.worst, failed.what
    of_rank = f" on rank {rank}" if len(job.ranks) > 1 else ""
    kind, text, site = (str(error.get(name) or "") for name in ("type", "text", "site"))
    site = "" if failed.anywhere else site
    frame = FRAME.fullmatch(site)
    at = f" at {site}" if site else ""
    said = f" {kind}{': ' if text else ''}{text}." if kind else ""
    directory = str(job.facts[rank].get("directory") or "")
    return Explanation(
        title=f"The job failed: {what}",
        summary=f"The job ended{of_rank}{at} because {what}.{said}",
        verdict=f"The job ended{of_rank}{at} because {what}.",
        changes=tuple(map(change, failed.changes)),
        where=() if frame is None else (Place(frame[2].removeprefix(directory), int(frame[3]), frame[1]),),
        sure="Read from the error that ended the process."
        if kind
        else "Read from the status with which the command ended.",
    )


RULE = Rule("How the job ended", check, explain)
