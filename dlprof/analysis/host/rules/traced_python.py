"""Python's own tracing is on while the job trains: `tracemalloc`, a trace function, a profiler of calls.

`tracemalloc` keeps, for every object that Python makes, where it was made. `sys.settrace` (debuggers, coverage) calls a
function at every line, `sys.setprofile` (cProfile) at every call. All are for looking into a program; left on, as by a
default of a memory callback, they slow whatever the step does in Python: its loop, the making of samples, workers that
are forked from it.

Needs the step log and the state of the process, which is looked at once, after the first steps.

Saving: at most what such tracing takes of the step's time in Python: waiting for data, and the host's. On small loops
of Python code, `tracemalloc` made these take 3 to 12 × as long, a trace function 1.4 to 8.6 ×, one of
`setprofile` 1.4 to 5.3 ×, cProfile 1.4 to 4.4 ×; the most of these is the bound. What other findings say of Python's
time was measured with it on, so that it comes first.

What to change: take it out, or trace a few steps: `tracemalloc.stop()` after them. The peak of a process's memory is
known without it: `resource.getrusage(resource.RUSAGE_SELF).ru_maxrss`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlprof.analysis.engine import JOB, Frame, Job, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.source.statements import Trees, calling, statements
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.errors import NotMeasured
from dlprof.units import digits

# A fact of the process: what it is, the calls that switch it on, the remedy, and how many times as long Python takes.
_HOOKS: Mapping[str, tuple[str, tuple[str, ...], str, float]] = {
    "tracemalloc": (
        "`tracemalloc` keeps where each object was made",
        ("tracemalloc.start",),
        "take `tracemalloc.start()` out, or call `tracemalloc.stop()` after the first steps; the peak of memory is"
        " `resource.getrusage(resource.RUSAGE_SELF).ru_maxrss`",
        12.0,
    ),
    "tracer": (
        "a function is called at every line of Python (`sys.settrace`: a debugger, coverage)",
        ("sys.settrace", "threading.settrace"),
        "`sys.settrace(None)` before training, or no debugger and no coverage",
        8.6,
    ),
    "profiler": (
        "a function is called at every call of Python (`sys.setprofile`, cProfile)",
        ("sys.setprofile", "cProfile.Profile", "cProfile.run"),
        "take the profiler of Python's calls from around the training, or run it for a few steps",
        5.3,
    ),
    "monitors": (
        "Python's calls or lines are monitored (sys.monitoring: cProfile, coverage)",
        ("cProfile.Profile", "cProfile.run"),
        "take the profiler of Python's calls from around the training, or run it for a few steps",
        4.4,
    ),
}

_PYTHON = ("input_wait", "host", "optimizer_host", "launch_latency")


def check(breakdown: Frame = needs(breakdown), job: Job = needs(JOB)) -> Estimate:
    on = {rank: _on(job, rank) for rank in job.ranks}
    if not any(on.values()):
        if not any(job.facts[rank].get("process") for rank in job.ranks):
            raise NotMeasured("whether Python is traced was not recorded")
        return nothing("Python is not traced")
    took = part(breakdown, *_PYTHON)
    gone = {rank: ns * (1 - 1 / max((_HOOKS[name][3] for name in on[rank]), default=1.0)) for rank, ns in took.items()}
    return Estimate(
        gone_ns=gone,
        noise_of=_PYTHON,
        loses="goes to Python's own tracing, at most",
        summary=f"{'; '.join(_HOOKS[name][0] for name in next(filter(None, on.values())))}",
    )


def _on(job: Job, rank: int) -> list[str]:
    state = job.facts[rank].get("process") or {}
    return [name for name in _HOOKS if state.get(name)]


def explain(estimate: Estimate, trees: Trees = needs(statements), job: Job = needs(JOB)) -> Explanation:
    name = _on(job, estimate.worst)[0]
    what, calls, remedy, times = _HOOKS[name]
    return Explanation(
        title="Python is traced while the job trains",
        summary=f"On rank {estimate.worst}, {what}. That slows all that the step does in Python, and what else is said"
        " of it.",
        changes=(change(remedy),),
        sure=f"At most: as if Python took {digits(times)} × as long, the most that was measured on small loops. What it"
        " costs this job is not known.",
        at_most=True,
        where=calling(trees, *calls),
    )


RULE = Rule("Traced Python", check, explain, (*_PYTHON, "other"), weight=2.0)
