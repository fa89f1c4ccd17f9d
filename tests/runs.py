"""Makes run folders for any test: traces, light layers and facts as a recording leaves them, on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dlprof.engine import JOB, RANK, Measure, Measured, RankData, every_measure, measure, needs_of
from dlprof.run import TRACE, Rank, open_run
from dlprof.tables import TABLES
from tests import traces

T = TypeVar("T")

MEASURES = {m.name for m in every_measure()}

MS = 1_000_000

CPU: Mapping[str, Any] = {"device": {"type": "cpu", "name": "CPU"}, "host": "node-1"}


def foreign(folder: Path, *ranks: dict[str, Any]) -> Path:
    """Write traces, one a rank, into a folder as another cluster would leave it."""
    for n, made in enumerate(ranks):
        traces.write(folder / f"rank{n}.json.gz", made)
    return folder


def recorded(
    folder: Path,
    *ranks: tuple[dict[str, Any] | None, Sequence[Mapping[str, Any]], Mapping[str, Any]],
    stalls: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    **info: Any,
) -> Path:
    """Write a run folder: for each rank its trace (or none), its steps, its facts and, where told, its stalls."""
    for n, (made, steps, facts) in enumerate(ranks):
        at = folder / "ranks" / f"{n:05d}"
        at.mkdir(parents=True)
        if made is not None:
            traces.write(at / "trace.json.gz", made)
        if steps:
            (at / "steps.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
        if stalls is not None:
            (at / "stalls.jsonl").write_text("".join(json.dumps(s) + "\n" for s in stalls[n]))
        (at / "facts.json").write_text(json.dumps({"format": 1, "rank": n, "world_size": len(ranks), **facts}))
    told = {
        "format": 1,
        "command": ["train.py"],
        "exit": {"code": 0, "signal": None},
        "start_ns": 1,
        "end_ns": 2,
        **info,
    }
    (folder / "run.json").write_text(json.dumps(told))
    return folder


def loading(
    folder: Path,
    rank: int,
    *,
    step: int,
    wait: int,
    fetch: int,
    cpu: int,
    n: int,
    workers: int,
    cores: float = 1.0,
    slow: int = 0,
    delay: int = 0,
    thread: int | None = None,
) -> None:
    """Write what a rank's loader left beside `n` steps of `light`: each one's batch, wait, fetch, and the CPU time.

    `cores`: the CPU time that the process used of each step but for the wait. With workers, the queue is always empty.
    `delay` and `thread`: how long its training thread was ready in each step and had no core, and ran.
    """
    begins = [traces.BASE_NS + k * 1_000 * MS for k in range(n)]
    asked = {"empty": 1, "ready": 0, "outstanding": 2 * workers} if workers else {}
    pids = " ".join(str(700 + w) for w in range(workers))
    rows: list[dict[str, Any]] = [
        {"kind": "start", "start_ns": begins[0] - 10, "dur_ns": 5, "count": 1, "step": 0, "loader": 0, "workers": pids}
    ]
    fetches = []
    for k, at in enumerate(begins):
        kind = "batch" if k else "first"
        rows.append({"kind": kind, "start_ns": at, "dur_ns": wait, "count": 1, "step": k, "loader": 0} | asked)
        busy = int((step - wait) * cores) + (0 if workers else cpu)
        rows.append({"kind": "usage", "start_ns": at, "dur_ns": step, "count": 1, "step": k, "cpu_ns": busy})
        rows[-1] |= {"delay_ns": delay, "thread_ns": min(busy, step) if thread is None else thread}
        worker = k % workers if workers else -1
        # A worker fetches one batch after the other, all of them when the run is steady.
        starts = begins[n // 2] + k // workers * fetch if workers else at + 1
        # Worker 0 may be so much slower than the others.
        fetch_of = fetch + slow * (worker == 0)
        starts += k // workers * slow if workers and worker == 0 else 0
        made = {"worker": worker, "pid": 700 + max(worker, 0), "start_ns": starts, "count": 1, "dur_ns": fetch_of}
        fetches.append(made | {"collate_ns": fetch // 10, "cpu_ns": cpu, "delay_ns": 0, "stored_bytes": 0})
    at_rank = folder / "ranks" / f"{rank:05d}"
    (at_rank / "loading.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (at_rank / "fetches.jsonl").write_text("".join(json.dumps(f) + "\n" for f in fetches))


def light(step: int, dur: int, start: int | None = None, **said: Any) -> dict[str, Any]:
    """Return one step of the light layer; by default a training step of `dur` ns, one a second."""
    return {
        "step": step,
        "kind": "train",
        "start_ns": traces.BASE_NS + step * 1_000 * MS if start is None else start,
        "dur_ns": dur,
        "lead_ns": -1,
        "fetch_ns": 0,
        "forward_ns": 0,
        "backward_ns": 0,
        "optimizer_ns": 0,
        "device_step_ns": -1,
        "fetches": 1,
        "backwards": 1,
        "optimizer_steps": 1,
        "profiled": 0,
        "first": 0,
    } | said


def stall(kind: str, step: int, dur: int, after: int = 0, **said: Any) -> dict[str, Any]:
    """Return a stall of `dur` ns, `after` ns into a step of `light`."""
    generation = 2 if kind == "garbage_collection" else None
    start = traces.BASE_NS + step * 1_000 * MS + after
    made = {"kind": kind, "start_ns": start, "dur_ns": dur, "step": step, "generation": generation, "path": None}
    return made | {"phase": "rest"} | said


def rank_of(folder: Path, made: dict[str, Any]) -> RankData:
    """Return one rank's tables, read from a trace."""
    return RankData(Rank(0, {TRACE: traces.write(folder / "trace.json", made)}))


def measured(path: Path, *wanted: Measure[Any] | Callable[..., Any]) -> Measured:
    """Measure a run in this process."""
    return measure(open_run(path), wanted, jobs=1)


def asked(of: Measured | RankData, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return what a function makes of `args`, and of what its other parameters name."""
    given, found = list(args), []
    for name in (need.name for need in needs_of(function) if need.name not in kwargs):
        if name in MEASURES or (name == JOB if isinstance(of, Measured) else name in (RANK, *TABLES)):
            found.append(of._value(next(need for need in needs_of(function) if need.name == name)))
        elif given:
            found.append(given.pop(0))
    return function(*found, *given, **kwargs)


def called(path: Path, function: Callable[..., T]) -> T:
    """Return what a function (a panel's `draw`, a rule's `check`) makes of what its parameters name, of a run."""
    return measured(path, function).call(function)
