"""What the diagnosis is worth on GPUs that are simulated: every fault, and random healthy jobs, against a known truth.

    python -m benchmarks.simulated --healthy 1000 --jobs 2 --out reports
    python -m benchmarks.simulated --only item_every_step --why
    python -m benchmarks.simulated --only host loading --each --fixed

Of each fault: whether its rule found it and named it first, what else was found, and how near the step, the share of
computation and the predicted step came to those of the simulation without a profiler, and of the fixed job. Even seeds
are for tuning, odd ones are held out and reported apart. Of healthy jobs, and of faults that cost nothing: findings
that are false. `--each` adds a row for each recording, with the first finding and the line that it names; `--fixed`
records the fixed jobs as well, in which the rule of the fault has nothing to find.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import simulated_table, summary
from benchmarks.simulated_table import ANY, Case, First
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.result import Outcome, Result
from simulator import folder, healthy, play, script
from simulator.faults import FAULTS, FILES
from simulator.faults.fault import Fault
from simulator.job import Job, Recording
from simulator.play import Share, Truth

FAILED = "it failed:"  # in a warning of a measure that broke


def of_fault(fault_name: str, seed: int, keep: Path | None) -> Case:
    """Plant a fault, record it, diagnose it, and compare with the truth."""
    began = time.perf_counter()
    fault = next(f for f in FAULTS if f.name == fault_name)
    job = fault.make(seed)
    how = fault.record(job)
    true = play.true(job, fault.warm, fault.steps)
    name, true_ns = f"{fault.name}-{seed}", _period(fault, true)
    fixed_ns = true_ns if fault.advised else _period(fault, play.true(fault.fix(job), fault.warm, fault.steps))
    case = Case(fault.name, fault.rule, seed, how.form, job.ranks, true_ns, fixed_ns, event_ns=how.event)
    case = replace(case, whole_loop=fault.scope == "loop", harmless=fault.harmless, accepted=fault.accepted)
    if fault.line:
        case = replace(case, line=f"{script.FILE}:{script.number(job, fault.line)}")
    case = _diagnosed(case, name, job, how, true, keep, began)
    if fault.advised is None or not case.batch_times:
        return case
    advised = play.true(fault.advised(job, case.batch_times), steps=fault.steps)
    return replace(case, fixed_ns=_period(fault, advised) / case.batch_times)


def of_fixed(fault_name: str, seed: int, keep: Path | None) -> Case:
    """Record the same job without the fault: its rule finds nothing there, and what else is found is another matter."""
    began = time.perf_counter()
    fault = next(f for f in FAULTS if f.name == fault_name)
    planted = fault.make(seed)
    job, how = fault.fix(planted), fault.record(planted)
    true = play.true(job, fault.warm, fault.steps)
    ns, name = _period(fault, true), f"{fault.name} (fixed)"
    case = Case(name, fault.rule, seed, how.form, job.ranks, ns, ns, event_ns=how.event, harmless=True, accepted=ANY)
    case = replace(case, whole_loop=fault.scope == "loop")
    return _diagnosed(case, f"{fault.name}-{seed}-fixed", job, how, true, keep, began)


def _period(fault: Fault, true: Truth) -> float:
    return true.loop_ns if fault.scope == "loop" else true.period_ns


def of_healthy(seed: int, keep: Path | None) -> Case:
    """Record a healthy job and diagnose it."""
    began = time.perf_counter()
    job, how, true = healthy.healthy(seed)
    case = Case("healthy", "", seed, how.form, job.ranks, true.period_ns, true.period_ns)
    return _diagnosed(case, job.name, job, how, true, keep, began)


def _diagnosed(case: Case, name: str, job: Job, how: Recording, true: Truth, keep: Path | None, began: float) -> Case:
    at = Path(tempfile.mkdtemp()) if keep is None else keep
    run = at / name
    shutil.rmtree(run, ignore_errors=True)
    try:
        folder.write(run, job, how)
        try:
            result = diagnose(open_run(run), RULES, jobs=1)
        except Exception as e:  # noqa: BLE001 - what fails is a row of the table
            return Case(**{**vars(case), "error": f"{type(e).__name__}: {e}", "seconds": time.perf_counter() - began})
    finally:
        if keep is None:
            shutil.rmtree(at)
    return _case(case, result, true, began)


def _case(case: Case, result: Result, true: Truth, began: float) -> Case:
    said = result.window.step_ns if result.window else None
    outcome = next((o for o in result.outcomes if o.id == case.rule), None)
    predicted = None
    if outcome is not None and outcome.state == "found" and said is not None:
        predicted = said - outcome.saving_ns
        if outcome.scope == "job":
            said = outcome.saving_ns / outcome.share if outcome.share else None  # of the whole loop
            predicted = None if said is None else said - outcome.saving_ns
    shares = {t.rank: t.share for t in result.time if t.category == "computation"}
    errors = [f"{o.id}: {o.why}" for o in result.outcomes if o.state == "error"]
    errors += [warning for warning in result.run.warnings if FAILED in warning]
    return Case(
        **{
            **vars(case),
            "reported_ns": said,
            "predicted_ns": predicted,
            "at_most": bool(outcome and outcome.at_most),
            "state": outcome.state if outcome else "",
            "true_computation": ()
            if case.whole_loop
            else tuple(r.parts["computation"] / r.step_ns for r in true.ranks),
            "reported_computation": tuple(share for _, share in sorted(shares.items())),
            "found": tuple((o.id, o.share) for o in (*result.found, *result.if_training_may_change)),
            "first": _first(result),
            "batch_times": 0.0 if outcome is None or outcome.state != "found" else _batch_times(outcome),
            "error": "; ".join(errors),
            "why": _why(case, result, true),
            "seconds": time.perf_counter() - began,
        }
    )


def _first(result: Result) -> First | None:
    """Return what the report says first: the rule, the step that it predicts, the lines of the script that it names."""
    if not result.found or result.window is None:
        return None
    one = result.found[0]
    places = [change.at for change in one.changes if change.at is not None] + list(one.where)
    named = dict.fromkeys(f"{Path(place.file).name}:{place.line}" for place in places)
    return First(one.id, result.window.step_ns - one.saving_ns, tuple(named))


def _batch_times(outcome: Outcome) -> float:
    """Return how many times as large the batch is that a finding advises first; 0: it advises none."""
    sizes = [s for change in outcome.changes[:1] for s in change.settings if s.name == "batch_size"]
    now, then = (sizes[0].now, sizes[0].to) if sizes else (None, None)
    return then / now if isinstance(now, int) and isinstance(then, int) and now else 0.0


def _why(case: Case, result: Result, true: Truth) -> tuple[str, ...]:
    """Return lines that tell what was said and what is true."""
    lines = [f"window: {result.window}"]
    lines += [_true(rank) for rank in true.ranks[:4]]
    for rank_number in sorted({t.rank for t in result.time})[:4]:
        said = {t.category: round(t.ns / 1e6, 2) for t in result.time if t.rank == rank_number and t.ns > 1e4}
        lines.append(f"said rank {rank_number}: {said}")
    for o in result.outcomes:
        if o.state == "found" or o.id == case.rule:
            lines.append(f"{o.id} {o.state} {o.saving_ns / 1e6:.2f} ms ({100 * o.share:.1f} %) {o.summary} {o.why}")
    return (*lines, *(f"warning: {w}" for w in result.run.warnings))


def _true(rank: Share) -> str:
    parts = {k: round(v / 1e6, 2) for k, v in rank.parts.items()}
    idle = {k: round(v / 1e6, 2) for k, v in rank.idle.items() if v > 1e4}
    return (
        f"true rank {rank.rank}: {rank.step_ns / 1e6:.2f} ms {parts} idle {idle}, lag {rank.lag_ns / 1e6:.1f} ms, "
        f"waits {rank.wait_ns / 1e6:.2f} ms, ran dry in a sync {rank.after_sync_ns / 1e6:.2f} ms"
    )


def run_all(
    faults: Sequence[Fault],
    seeds: int,
    count: int,
    jobs: int,
    keep: Path | None,
    done: Callable[[Case], None],
    *,
    fixed: bool = False,
) -> list[Case]:
    """Run every fault with every seed, healthy jobs, and the fixed ones; `done` is called with each case."""
    with ProcessPoolExecutor(jobs) as pool:
        waiting = [pool.submit(of_fault, fault.name, seed, keep) for fault in faults for seed in range(seeds)]
        if fixed:
            whole = [fault for fault in faults if not fault.harmless and not fault.advised]
            waiting += [pool.submit(of_fixed, fault.name, seed, keep) for fault in whole for seed in range(seeds)]
        waiting += [pool.submit(of_healthy, seed, keep) for seed in range(count)]
        return [_pass_on(future.result(), done) for future in waiting]


def _pass_on(case: Case, done: Callable[[Case], None]) -> Case:
    done(case)
    return case


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that the command line asks for, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="*", default=None, help="faults, rules, or files of faults (default: all)")
    parser.add_argument("--seeds", type=int, default=6, help="of each fault (default: %(default)s)")
    parser.add_argument("--healthy", type=int, default=50, help="random healthy jobs (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    parser.add_argument("--out", type=Path, help="write simulated.json and simulated.md here")
    parser.add_argument(
        "--why", action="store_true", help="tell of each case that failed what was said and what is true"
    )
    parser.add_argument("--each", action="store_true", help="add a row for each recording, with what is said first")
    parser.add_argument("--fixed", action="store_true", help="record the fixed jobs too")
    asked = parser.parse_args(argv)
    faults = [f for f in FAULTS if asked.only is None or {f.name, f.rule, FILES[f.name]} & set(asked.only)]
    if asked.only and not faults and "healthy" not in asked.only:
        parser.error(f"no such fault: {', '.join(asked.only)}; there are {', '.join(f.name for f in FAULTS)}")
    count = asked.healthy if asked.only is None or "healthy" in asked.only else 0

    def done(case: Case) -> None:
        failed = simulated_table.failures(case)
        print(f"{case.name} seed {case.seed} ({case.form}): {'; '.join(failed) or 'well'}", file=sys.stderr, flush=True)
        if asked.why and failed:
            print("".join(f"    {line}\n" for line in case.why), file=sys.stderr, end="", flush=True)

    cases = run_all(faults, asked.seeds, count, asked.jobs, asked.keep, done, fixed=asked.fixed)
    accepted = {f.name: f.accepted for f in FAULTS}
    without = {rule.id for rule in RULES} - {fault.rule for fault in FAULTS}
    text = simulated_table.table(cases, accepted, sorted(without))
    print(text)
    if asked.each:
        print(simulated_table.each(cases))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "simulated.json").write_text("[\n" + ",\n".join(map(_line, cases)) + "\n]\n")
        (asked.out / summary.SIMULATED).write_text(text)
        summary.write(asked.out)
    return 0


def _line(case: Case) -> str:
    """Return what is kept of a case: all but its explanation and what it took."""
    kept = {k: v for k, v in asdict(case).items() if k not in ("why", "seconds")}
    return json.dumps(kept, default=float)


if __name__ == "__main__":
    sys.exit(main())
