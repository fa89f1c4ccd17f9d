"""Two results side by side: what got faster or slower from run A to run B, and was the predicted gain reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dlprof.analysis.compare.predictions import Prediction, prediction
from dlprof.analysis.compare.settings_diff import Setting, differing
from dlprof.analysis.compare.significance import LEAST_NOISE, LEAST_SHARE, NOISE, Difference
from dlprof.result import CATEGORIES, MOST_WORK, QUANTILES, Exchange, Outcome, Result, Work, plain

FORMAT = 2

# What a step does: where it differs, so does what a step should take.
_WORK = (("Loader", "batch size"), ("Model", "parameters"))

State = Literal["gone", "new", "less", "more", "same", "unknown"]


@dataclass(frozen=True)
class WorkDifference:
    """An operator, a kernel or a kind of collective: its time, and how often it is called a step (None: not there)."""

    time: Difference
    a_calls: float | None
    b_calls: float | None
    wait: Difference | None = None  # of collectives: waiting for other ranks, next to the transfer


@dataclass(frozen=True)
class FindingChange:
    """What became of one bottleneck. gone: B was looked at and does not have it; unknown: one run cannot say (why)."""

    id: str
    state: State
    title: str
    a_ns: float | None
    b_ns: float | None
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """All that a renderer may know of two runs. Empty tuples and None: not compared, and `not_compared` says why."""

    a: Result
    b: Result
    step: Difference | None
    quantiles: tuple[Difference, ...]  # of the steps, the mean over ranks, by QUANTILES; their noise is not known
    ranks: tuple[Difference, ...]
    time: tuple[Difference, ...]  # by category, the mean over ranks
    time_by_rank: tuple[tuple[int, tuple[Difference, ...]], ...]
    findings: tuple[FindingChange, ...]
    operators: tuple[WorkDifference, ...]
    kernels: tuple[WorkDifference, ...]
    exchanges: tuple[WorkDifference, ...]
    settings: tuple[Setting, ...]
    measured: tuple[Setting, ...]  # facts that are no choice, where they differ
    prediction: Prediction | None
    not_compared: tuple[str, ...]
    doubts: tuple[str, ...]  # what a reader must know before trusting the differences


def compare(a: Result, b: Result) -> Comparison:
    """Compare two results; what cannot be compared is left out, with the reason."""
    refused = list(_refused(a, b))
    step = None if refused else _step(a, b)
    least = LEAST_SHARE * a.window.step_ns if a.window else 0.0
    same_ranks = a.run.world_size == b.run.world_size
    if not refused and not same_ranks:
        refused.append(
            f"ranks one by one: A has {a.run.world_size} of them and B {b.run.world_size}; means over the ranks are"
            " compared, of steps that may do other work"
        )
    time, of_ranks = _times(a, b, least) if step else ((), ())
    operators, kernels = (_works(a, b, kind, least) if step else () for kind in ("operator", "kernel"))
    exchanges = _exchanges(a, b, least) if step else ()
    if step:
        refused += _missing(a, b)
    settings, measured = differing(a, b)
    other_work = [s for s in settings if (s.section, s.name) in _WORK and s.a and s.b]
    return Comparison(
        a=a,
        b=b,
        step=step,
        quantiles=_quantiles(a, b, least) if step else (),
        ranks=_ranks(a, b, least) if step and same_ranks else (),
        time=time,
        time_by_rank=of_ranks if same_ranks else (),
        findings=_findings(a, b, least),
        operators=operators,
        kernels=kernels,
        exchanges=exchanges,
        settings=settings,
        measured=measured,
        prediction=prediction(a, b, step, settings)
        if step and same_ranks and _alike(a, b) and not other_work
        else None,
        not_compared=tuple(refused),
        doubts=tuple(_doubts(a, b, other_work)) if step else (),
    )


def to_json(c: Comparison) -> dict[str, Any]:
    """Return the comparison as plain data: the differences, and of both runs which they are."""
    said: dict[str, Any] = {"format": FORMAT, "noise": NOISE}
    for name, result in (("a", c.a), ("b", c.b)):
        said[name] = {"run": plain(result.run), "window": plain(result.window) if result.window else None}
    said["step"] = _told(c.step) if c.step else None
    said["quantiles"] = [_told(d) for d in c.quantiles]
    said["ranks"] = [_told(d) for d in c.ranks]
    said["time"] = [_told(d) for d in c.time]
    said["time_by_rank"] = [{"rank": rank, "time": [_told(d) for d in of]} for rank, of in c.time_by_rank]
    said["findings"] = [plain(f) for f in c.findings]
    for name, work in (("operators", c.operators), ("kernels", c.kernels), ("collectives", c.exchanges)):
        said[name] = [
            {**_told(w.time), "a_calls": w.a_calls, "b_calls": w.b_calls, "wait": _told(w.wait) if w.wait else None}
            for w in work
        ]
    said["settings"] = [plain(s) for s in c.settings]
    said["measured"] = [plain(s) for s in c.measured]
    said["prediction"] = plain(c.prediction) if c.prediction else None
    return said | {"not_compared": list(c.not_compared), "doubts": list(c.doubts)}


def _told(d: Difference) -> dict[str, Any]:
    return {**plain(d), "ns": d.ns, "verdict": d.verdict}


def _refused(a: Result, b: Result) -> Iterator[str]:
    """Say why steps cannot be compared at all."""
    for name, result in (("A", a), ("B", b)):
        if result.window is None:
            yield f"steps and their parts: no steady step was recorded in {name}"
        elif result.window.unit == "trace":
            yield f"steps and their parts: nothing marks a step in {name}, so its whole trace stands for one"


def _alike(a: Result, b: Result) -> bool:
    return a.run.device == b.run.device


def _doubts(a: Result, b: Result, other_work: Iterable[Setting]) -> Iterator[str]:
    assert a.window is not None
    assert b.window is not None
    if not _alike(a, b):
        yield (
            f"the devices differ ({a.run.device or 'not told'} and {b.run.device or 'not told'}): what is faster or"
            " slower may be theirs, and no prediction is held against B"
        )
    if a.window.source != b.window.source:
        traced, other = ("A", "B") if a.window.source == "trace" else ("B", "A")
        yield (
            f"{traced}'s step is that of its traced steps, which the profiler slows, {other}'s that of the others: they"
            " differ by that alone"
        )
    for s in other_work:
        yield (
            f"{s.name} is {s.a} in A and {s.b} in B: their steps do different work, and no prediction is held against B"
        )
    for name, result in (("A", a), ("B", b)):
        if result.run.missing_ranks:
            n = len(result.run.missing_ranks)
            yield f"{n} of {result.run.world_size} ranks of {name} are not here; means are over the others"
    if any(result.window is None or result.window.noise_ns is None for result in (a, b)):
        yield "a run with one measured step, or written by an older dlprof, does not tell its noise"


def _missing(a: Result, b: Result) -> Iterator[str]:
    """Say what of the step only one of the runs tells."""
    parts: tuple[tuple[str, Callable[[Result], object]], ...] = (
        ("parts of the step", lambda r: r.time),
        ("operators", lambda r: any(w.kind == "operator" for w in r.work)),
        ("kernels", lambda r: any(w.kind == "kernel" for w in r.work)),
        ("collectives", lambda r: r.exchanges),
    )
    for what, there in parts:
        lacking = [name for name, result in (("A", a), ("B", b)) if not there(result)]
        if len(lacking) == 1:
            yield f"{what}: {lacking[0]} has none"


def _noise(*errors: float | None) -> float | None:
    """Combine standard errors of what is independent; None where one is not known."""
    known = [e for e in errors if e is not None]
    return math.hypot(*known) if len(known) == len(errors) else None


def _step(a: Result, b: Result) -> Difference:
    assert a.window is not None
    assert b.window is not None
    return Difference(
        "step",
        a.window.step_ns,
        b.window.step_ns,
        _noise(a.window.noise_ns, b.window.noise_ns),
        LEAST_SHARE * a.window.step_ns,
    )


def _ranks(a: Result, b: Result, least: float) -> tuple[Difference, ...]:
    of_b = {s.rank: s for s in b.steps}
    return tuple(
        Difference(
            f"rank {s.rank}",
            s.step_ns,
            of_b[s.rank].step_ns,
            _noise(s.noise_ns, of_b[s.rank].noise_ns),
            least,
        )
        for s in a.steps
        if s.rank in of_b
    )


def _quantiles(a: Result, b: Result, least: float) -> tuple[Difference, ...]:
    """Return the quantiles of the steps, as the means over the ranks; none where a run does not tell them."""
    of_a, of_b = ([s.quantiles_ns for s in r.steps if len(s.quantiles_ns) == len(QUANTILES)] for r in (a, b))
    if not of_a or not of_b:
        return ()
    means = [[sum(column) / len(of) for column in zip(*of, strict=True)] for of in (of_a, of_b)]
    names = [f"{100 * q:.0f} %" for q in QUANTILES]
    return tuple(Difference(n, x, y, None, least) for n, x, y in zip(names, *means, strict=True))


Part = tuple[float, float | None]  # ns and its standard error


def _times(
    a: Result, b: Result, least: float
) -> tuple[tuple[Difference, ...], tuple[tuple[int, tuple[Difference, ...]], ...]]:
    """Return categories' differences, as the mean over the ranks and rank by rank; none where a run has no parts."""
    of_a, of_b = _parts(a), _parts(b)
    if not of_a or not of_b:
        return (), ()
    means = [_mean(list(of.values())) for of in (of_a, of_b)]
    each = tuple((rank, _categories(of_a[rank], of_b[rank], least)) for rank in sorted(of_a) if rank in of_b)
    return _categories(means[0], means[1], least), each


def _parts(result: Result) -> dict[int, dict[str, Part]]:
    """Return rank → category → part. None is known better than the step that it is a share of."""
    steps = {s.rank: s.noise_ns for s in result.steps}
    found: dict[int, dict[str, Part]] = {}
    for p in result.time:
        of_step = steps.get(p.rank)
        noise = _noise(p.noise_ns or None, None if of_step is None else of_step * p.share)
        found.setdefault(p.rank, {})[p.category] = (p.ns, noise)
    return found


def _mean(ranks: list[dict[str, Part]]) -> dict[str, Part]:
    """Return the mean over the ranks, with the mean of their noise: they wait for each other, and err together."""
    found: dict[str, Part] = {}
    for category in dict.fromkeys(c for parts in ranks for c in parts):
        mine = [parts.get(category, (0.0, 0.0)) for parts in ranks]
        noise = [e for _, e in mine if e is not None]
        found[category] = (
            sum(ns for ns, _ in mine) / len(mine),
            sum(noise) / len(noise) if len(noise) == len(mine) else None,
        )
    return found


def _categories(a: Mapping[str, Part], b: Mapping[str, Part], least: float) -> tuple[Difference, ...]:
    order = [c for c in CATEGORIES if c in a or c in b] + sorted((a.keys() | b.keys()) - set(CATEGORIES))
    rows = []
    for category in order:
        (of_a, noise_a), (of_b, noise_b) = a.get(category, (0.0, 0.0)), b.get(category, (0.0, 0.0))
        rows.append(Difference(category, of_a, of_b, _noise(noise_a, noise_b), least))
    return tuple(rows)


def _works(a: Result, b: Result, kind: str, least: float) -> tuple[WorkDifference, ...]:
    """Return what operators or kernels take in both runs, what changed most first; none where only one run tells them.

    What is not among the heaviest of a run takes at most what the lightest of these does; where that leaves nothing to
    say, it is left out.
    """
    of_a, of_b = ({w.name: w for w in r.work if w.kind == kind} for r in (a, b))
    if not of_a or not of_b:
        return ()
    floors = [min(w.ns for w in of.values()) if len(of) >= MOST_WORK else 0.0 for of in (of_a, of_b)]

    def part(w: Work | None, floor: float) -> Part:
        # Of a single step, or of older results, the noise is not known.
        return (floor, 0.0) if w is None else (w.ns, w.noise_ns or None)

    rows = []
    for name in dict.fromkeys((*of_a, *of_b)):
        one, other = of_a.get(name), of_b.get(name)
        (a_ns, a_noise), (b_ns, b_noise) = part(one, floors[0]), part(other, floors[1])
        time = Difference(name, a_ns, b_ns, _noise(a_noise, b_noise), least)
        if (one is not None and other is not None) or _larger(time, missing_in_b=other is None):
            calls = (one.calls if one else None, other.calls if other else None)
            rows.append(WorkDifference(time, *calls))
    return tuple(sorted(rows, key=lambda r: -abs(r.time.ns or 0.0)))


def _larger(d: Difference, *, missing_in_b: bool) -> bool:
    """Return whether what one run does not list is surely less there."""
    return d.ns is not None and (d.ns < 0 if missing_in_b else d.ns > 0)


def _exchanges(a: Result, b: Result, least: float) -> tuple[WorkDifference, ...]:
    """Return the collectives by kind, ranks and size; their noise is not known, but where nothing differs."""
    if not a.exchanges or not b.exchanges:
        return ()

    def key(e: Exchange) -> tuple[str, int, str]:
        return e.collective, e.ranks, e.size

    of_a, of_b = ({key(e): e for e in r.exchanges} for r in (a, b))
    rows = []
    for k in dict.fromkeys((*of_a, *of_b)):
        one, other = of_a.get(k), of_b.get(k)
        name = f"{k[0] or 'not told'} · {k[1]} ranks · {k[2]}"
        time = Difference(name, one.transfer_ns if one else 0.0, other.transfer_ns if other else 0.0, None, least)
        waits = tuple(e.wait_ns if e else 0.0 for e in (one, other))
        wait = None if None in waits else Difference(f"{name}, waiting", waits[0], waits[1], None, least)
        calls = (one.count if one else None, other.count if other else None)
        rows.append(WorkDifference(time, *calls, wait))
    return tuple(sorted(rows, key=lambda r: -abs(r.time.ns or 0.0) - abs((r.wait.ns or 0.0) if r.wait else 0.0)))


def _findings(a: Result, b: Result, least: float) -> tuple[FindingChange, ...]:
    """Return what became of each bottleneck that was found in either run, the dearest first.

    What is below the threshold in one run only is not gone for that: the figures of both are compared.
    """
    of_a, of_b = ({o.id: o for o in r.outcomes} for r in (a, b))
    changes = []
    for name in dict.fromkeys(o.id for r in (a, b) for o in r.found):
        one, other = of_a.get(name), of_b.get(name)
        in_a = one is not None and one.state == "found"
        told, missing = (one, other) if in_a else (other, one)
        assert told is not None
        state: State = "unknown"
        why = ""
        if one is not None and other is not None and {one.state, other.state} <= {"found", "clear"}:
            state = _became(one, other, least)
            clear = next((o for o in (one, other) if o.state == "clear"), None)
            if clear is not None and clear.summary:
                why = f"{'A' if clear is one else 'B'}: {clear.summary}"
        else:
            where = "B" if in_a else "A"
            why = f"{where}: {missing.why}" if missing else f"{where} was written by a dlprof without this rule"
        changes.append(FindingChange(name, state, told.title, _ns(one), _ns(other), why))
    return tuple(sorted(changes, key=lambda f: -max(f.a_ns or 0.0, f.b_ns or 0.0)))


def _became(one: Outcome, other: Outcome, least: float) -> State:
    """Return what became of a bottleneck that both runs were judged by: `one` is A's, `other` B's."""
    if "risk" in (one.scope, other.scope):  # nothing is saved: it is there or not
        return "same" if one.state == other.state else "gone" if one.state == "found" else "new"
    change = other.saving_ns - one.saving_ns
    if abs(change) < max(LEAST_NOISE * math.hypot(one.noise_ns, other.noise_ns), least):
        return "same"
    smaller = min(one, other, key=lambda o: o.saving_ns)
    none = smaller.state == "clear" and smaller.share < LEAST_SHARE
    if change < 0:
        return "gone" if none else "less"
    return "new" if none else "more"


def _ns(outcome: Outcome | None) -> float | None:
    """Return what an outcome saves; None where it is not told, as of what is clear in a result of format 1."""
    told = outcome is not None and (outcome.state == "found" or bool(outcome.by_rank))
    return outcome.saving_ns if outcome is not None and told else None
