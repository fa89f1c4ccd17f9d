"""Asks every rule about a run and puts what they say into one result.

A rule answers exactly one of four: found, clear, not measured (why), error (what). One that raises costs only its own
row. The saving is the severity: there is no other.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from dlprof import __version__, overview
from dlprof.engine import Measure, Measured, MeasureFailed, Progress, measure
from dlprof.errors import DlprofError, NotMeasured
from dlprof.estimate import Estimate
from dlprof.measures.arithmetic import arithmetic
from dlprof.measures.bandwidth import exchanged, size_class
from dlprof.measures.blame import blame
from dlprof.measures.breakdown import breakdown, part
from dlprof.measures.loader import fed_ns, loader_means, worker_means
from dlprof.measures.queue import device_lag
from dlprof.measures.replay import saving as replay
from dlprof.measures.room import room
from dlprof.measures.spread import spread
from dlprof.measures.whole_job import loop_step_ns, whole_job
from dlprof.measures.work import work_means
from dlprof.panels import PICTURES
from dlprof.result import (
    CATEGORIES,
    MOST_RANKS,
    QUANTILES,
    Blame,
    DeviceTime,
    Exchange,
    Outcome,
    RankCost,
    RankStep,
    Result,
    TimePart,
    Together,
    Window,
    Work,
)
from dlprof.run import Run
from dlprof.timeline.device import device_time
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import duration, percent

# A rule speaks only where its saving is at least this share of the step, and twice the standard error of what it was
# estimated from: what came and went by chance is no finding. Two per cent is where existing tools agree to be silent.
LEAST_SHARE = 0.02
LEAST_NOISE = 2.0

# Of what varies more than that, the least that the measured steps show is told: from where tools grade a loss as
# notable.
LEAST_SHARE_OF_VARYING = 0.05


# A part of a saving, ns, and the categories of `time` that it comes out of.
_Piece = tuple[frozenset[str], float]


@dataclass(frozen=True)
class Rule:
    """One known bottleneck. `check` returns an Estimate or raises NotMeasured; `needs`: all it may ask for.

    `saves_from`: the categories of `time` that its saving comes out of; none where it lies between the steady steps.
    `feeds`: its change makes the loader faster, whose pace bounds what other changes save. `notable`: the share of the
    step from which on its saving is worth a finding.
    """

    id: str
    title: str
    needs: tuple[Measure, ...]
    check: Callable[[Measured], Estimate]
    saves_from: tuple[str, ...] = ()
    feeds: bool = False
    notable: float = LEAST_SHARE

    @property
    def manual(self) -> str:
        """The docstring of the rule's file."""
        return inspect.cleandoc(sys.modules[self.check.__module__].__doc__ or "")


def diagnose(run: Run, rules: Sequence[Rule], jobs: int | None = None, progress: Progress | None = None) -> Result:
    """Measure a run, ask every rule, and give the result."""
    wanted = [m for r in rules for m in r.needs]
    wanted += [m for p in PICTURES for m in p.needs]
    wanted += [
        blame,
        breakdown,
        device_lag,
        device_time,
        exchanged,
        loader_means,
        spread,
        step_means,
        whole_job,
        work_means,
        worker_means,
        *overview.NEEDS,
    ]
    measured = measure(run, wanted, jobs, progress)
    asked = [_ask(rule, measured) for rule in rules]
    outcomes = [outcome for outcome, _ in asked]
    order = {"found": 0, "clear": 1, "not_measured": 2, "error": 3}
    outcomes.sort(key=lambda o: (order[o.state], -o.saving_ns, o.id))
    # What a finding shows is not shown twice.
    shown = [o.evidence for o in outcomes if o.evidence]
    return Result(
        run=overview.run_info(measured),
        window=_window(measured),
        device=_device(measured),
        time=_time(measured),
        outcomes=tuple(outcomes),
        together=_together(measured, [(o, pieces) for o, pieces in asked if o.state == "found"]),
        panels=tuple(p for p in overview.drawn(measured, PICTURES) if p not in shown),
        facts=overview.facts(measured),
        dlprof=__version__,
        blame=_blame(measured),
        steps=_steps(measured),
        work=_work(measured),
        exchanges=_exchanges(measured),
    )


def _ask(rule: Rule, run: Measured) -> tuple[Outcome, list[_Piece]]:
    """Return what becomes of a rule, and the pieces of what it saves."""

    def outcome(state: str, **said: object) -> Outcome:
        return Outcome(**{"id": rule.id, "state": state, "title": rule.title, "manual": rule.manual, **said})  # type: ignore[arg-type]

    try:
        estimate = rule.check(run)
        _check_figures(estimate)
        if estimate.scope == "risk":
            state, said = _risk(estimate)
        else:
            state, said = _judged(rule, run, estimate)
        found = outcome(state, **said)
    except NotMeasured as e:
        return outcome("not_measured", why=str(e)), []
    except MeasureFailed as e:
        return outcome("error", why=str(e)), []
    except Exception as e:  # noqa: BLE001 - one rule's fault costs only its own row
        return outcome("error", why=f"{type(e).__name__}: {e}"), []
    saves = state == "found" and estimate.scope != "risk"
    return found, _pieces(rule, found.saving_ns, estimate.within) if saves else []


def _judged(rule: Rule, run: Measured, estimate: Estimate) -> tuple[str, dict[str, object]]:
    """Return whether a bottleneck is found or clear, and the fields of its outcome.

    Raises NotMeasured where what it costs varies too much to tell.
    """
    step = loop_step_ns(run) if estimate.scope == "job" else mean_step_ns(run)
    of = "of the training loop's time" if estimate.scope == "job" else of_step(run)
    fed = fed_ns(run) if estimate.scope == "step" and not rule.feeds else 0.0
    unfed = max(step - fed, 0.0)
    most = min(step, _room(rule, run), unfed)
    saving = max(min(estimate.saving_ns, most), 0.0)
    share = saving / step if step else 0.0
    lost = (estimate.saving_ns if estimate.lost_ns is None else estimate.lost_ns) / step if step else 0.0
    loses = f"{percent(lost)} {of} {estimate.loses}"
    slow_loader = f"the loaders feed a step every {duration(fed)} at the best" if fed and most == unfed else ""
    said = {**_figures(estimate), "saving_ns": saving, "share": share, "speedup": _speedup(share), "lost_share": lost}
    notable = rule.notable if estimate.notable is None else estimate.notable
    if estimate.explain is None or estimate.saving_ns < notable * step or share < LEAST_SHARE:
        summary = estimate.summary or loses
        return "clear", {**said, "summary": f"{summary}: {slow_loader}" if slow_loader and share else summary}
    varied = ""
    if saving < LEAST_NOISE * estimate.noise_ns:
        varies = f"{percent(share)} {of} ± {percent(estimate.noise_ns / step)}"
        saving = min(max(saving - LEAST_NOISE * estimate.noise_ns, estimate.least_ns), saving)
        share = saving / step
        if share < LEAST_SHARE_OF_VARYING:
            raise NotMeasured(f"{varies}: it varies too much between the measured steps; record more of them")
        varied = f"In the mean it would save {varies}: told is the least that the measured steps show."
        said |= {"saving_ns": saving, "share": share, "speedup": _speedup(share)}
    explained = _explained(estimate)
    explained["verdict"] = verdict = explained["verdict"] or f"{loses}."
    # What is cut by less than a part in a hundred was rounding, or the trace's own spread.
    if estimate.saving_ns > 1.01 * most:
        cut = f", as {slow_loader}" if slow_loader else " to what the step has of it, waiting for it included"
        explained["sure"] = f"{explained['sure']} Cut{cut}.".strip()
    if varied:
        explained["sure"] = f"{explained['sure']} {varied}"
        explained["verdict"] = f"At least {percent(share)} {of} would be saved: {lowered(str(verdict))}"
    return "found", said | explained


def _risk(estimate: Estimate) -> tuple[str, dict[str, object]]:
    """Return the same of what may end the job: there is no share of the step to judge it by."""
    figures = _figures(estimate) | {"by_rank": ()}  # which ranks it may happen to; it costs them no time
    if estimate.explain is None:
        return "clear", {**figures, "summary": estimate.summary}
    return "found", figures | _explained(estimate)


def _figures(estimate: Estimate) -> dict[str, object]:
    """Return what stands in an outcome, found or clear, of an estimate's figures."""
    by_rank = {rank: float(ns) for rank, ns in estimate.by_rank_ns.items() if ns > 0}
    dearest = sorted(sorted(by_rank, key=lambda rank: -by_rank[rank])[:MOST_RANKS])
    most = max(by_rank.values(), default=0.0)
    return {
        "scope": estimate.scope,
        "noise_ns": estimate.noise_ns,
        "by_rank": tuple(RankCost(rank, by_rank[rank]) for rank in dearest),
        "ranks": tuple(sorted(rank for rank, ns in by_rank.items() if ns >= most / 2)),
    }


def _explained(estimate: Estimate) -> dict[str, object]:
    assert estimate.explain is not None
    explanation = estimate.explain()
    for row in explanation.evidence.rows if explanation.evidence else ():
        for cell in row:
            _check_value(cell)
    return {f.name: getattr(explanation, f.name) for f in fields(explanation)}


def lowered(sentence: str) -> str:
    """Return a sentence so that it can follow a colon; what begins with a number stays as it is."""
    return sentence[:1].lower() + sentence[1:]


def _room(rule: Rule, run: Measured) -> float:
    """Return what the mean steady step has of what a rule saves from, ns; infinity where it is not divided.

    A rule and `time` may measure in different steps: the light layer's all, the trace's few. What a report shows must
    agree with itself, so the smaller of the two counts, and the reader is told.
    """
    if rule.saves_from:
        with suppress(NotMeasured, MeasureFailed):
            return room(run, rule.saves_from)
    return math.inf


def _pieces(rule: Rule, saving_ns: float, within: Mapping[str, float]) -> list[_Piece]:
    """Split a saving by what it comes out of: single categories, and the rest out of any other of the rule's."""
    pieces, left = [], saving_ns
    for category, ns in within.items():
        pieces.append((frozenset((category,)), min(max(ns, 0.0), left)))
        left -= pieces[-1][1]
    others = frozenset(rule.saves_from) - within.keys()
    return pieces if pieces and left <= 0 else [*pieces, (others or frozenset(rule.saves_from), left)]


def _together(run: Measured, found: Sequence[tuple[Outcome, list[_Piece]]]) -> Together | None:
    """Bound what all findings save together: what two of them claim is there once, and the step has no more of it.

    What they save from the same categories is at most what all of these would give; from different ones at most their
    sum, but where no rank has a part in all of them: then each hides what another would save, and only the step's own
    parts bound them. With findings of the whole job it is the training loop's. None where nothing was found, and
    where the bound is the whole step: that tells nothing.
    """
    found = [(o, pieces) for o, pieces in found if o.scope != "risk"]
    if not found:
        return None
    dearest = max(o.saving_ns for o, _ in found)
    inside, job = ([(o, pieces) for o, pieces in found if o.scope == scope] for scope in ("step", "job"))
    pieces = [piece for _, mine in inside for piece in mine]
    total = sum(_at_most(run, categories, claims) for categories, claims in _overlapping(pieces))
    if inside and not set(run.ranks).intersection(*(o.ranks for o, _ in inside if o.ranks)):
        total = _removable(run, frozenset().union(*(categories for categories, _ in pieces)))
    step = loop_step_ns(run) if job else mean_step_ns(run)
    total = min(max(total + sum(o.saving_ns for o, _ in job), dearest), step)
    if total > max(dearest, (1 - LEAST_SHARE) * step):
        return None
    return Together(total, total / step, _speedup(total / step))


def _overlapping(pieces: Iterable[_Piece]) -> list[tuple[frozenset[str], list[float]]]:
    """Gather pieces that have a category in common, directly or through others: categories, savings."""
    groups: list[tuple[frozenset[str], list[float]]] = []
    for categories, saving in pieces:
        claims = [saving]
        for group in [g for g in groups if g[0] & categories]:
            groups.remove(group)
            categories, claims = categories | group[0], group[1] + claims
        groups.append((categories, claims))
    return groups


def _at_most(run: Measured, categories: frozenset[str], claims: Sequence[float]) -> float:
    """Return what findings save together that have these categories in common."""
    return sum(claims) if len(claims) < 2 else min(sum(claims), max(_removable(run, categories), *claims))


def _removable(run: Measured, categories: frozenset[str]) -> float:
    """Return what the job saves without all of some categories, on every rank, ns; infinity where that is not known."""
    with suppress(NotMeasured, MeasureFailed):
        # What is waiting among communication and bubbles goes with its cause: a replay of the ranks' own time tells
        # nothing of it.
        waits = {"communication", "pipeline_bubble"} & categories
        return room(run, categories) if waits else replay(run, part(run, *categories))
    return math.inf


def _speedup(share: float) -> float:
    return 1 / (1 - share) if share < 1 else 1e6


def _check_figures(estimate: Estimate) -> None:
    figures = (estimate.saving_ns, estimate.noise_ns, estimate.least_ns, estimate.lost_ns)
    for value in (*figures, *estimate.within.values(), *estimate.by_rank_ns.values(), *estimate.by_rank_ns):
        _check_value(value)


def _check_value(value: object) -> None:
    """Raise for what result.json cannot hold: a figure that is no number, a value of another library."""
    if not isinstance(value, (str, int, float, type(None))):
        raise TypeError(f"{value!r} is a {type(value).__name__}, not text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value!r} among its figures")


def _rows(run: Measured, measure: Measure) -> list[dict[Any, Any]]:
    """Return a measure's rows, each a dictionary of plain Python values; none where it was not measured."""
    try:
        return run.frame(measure).to_dict("records")
    except (NotMeasured, MeasureFailed):
        return []


def _window(run: Measured) -> Window | None:
    try:
        means = run.frame(step_means)
    except (NotMeasured, MeasureFailed):
        return None
    overhead = means["overhead"].mean()
    computed = _arithmetic(run)
    return Window(
        steps=int(means["steps"].min()),
        source="steps" if (means["source"] == "steps").all() else "trace",
        step_ns=mean_step_ns(run),
        overhead=None if pd.isna(overhead) else float(overhead),
        unit="step" if (means["unit"] == "step").all() else "trace",
        traced_steps=int(means["traced_steps"].min()),
        noise_ns=_noise(run),
        lag_ns=_lag(run),
        **computed,
    )


def _lag(run: Measured) -> float | None:
    try:
        return float(run.frame(device_lag)["lag_ns"].mean())
    except (NotMeasured, MeasureFailed):
        return None


def _noise(run: Measured) -> float | None:
    """Return the standard error of the run's mean step, ns. Ranks that wait for each other err together: no smaller one
    for there being many of them.
    """
    try:
        noise = run.frame(spread)["noise_ns"]
    except (NotMeasured, MeasureFailed):
        return None
    return None if noise.isna().any() else float(noise.mean())


def _arithmetic(run: Measured) -> dict[str, float]:
    try:
        means = run.frame(arithmetic)[["flops", "mfu"]].mean()
    except (NotMeasured, MeasureFailed):
        return {}
    return {str(k): float(v) for k, v in means.items() if not pd.isna(v)}


def _device(run: Measured) -> tuple[DeviceTime, ...]:
    return tuple(DeviceTime(**{str(k): int(v) for k, v in row.items()}) for row in _rows(run, device_time))


def _time(run: Measured) -> tuple[TimePart, ...]:
    try:
        frame = run.frame(breakdown)
    except (NotMeasured, MeasureFailed):
        return ()
    total = frame.groupby("rank")["ns"].transform("sum")
    frame = frame.assign(
        share=frame["ns"] / total, place=frame["category"].map({c: i for i, c in enumerate(CATEGORIES)})
    ).sort_values(["rank", "place"])
    return tuple(
        TimePart(int(r), str(c), float(n), float(s), float(e))
        for r, c, n, s, e in zip(
            frame["rank"], frame["category"], frame["ns"], frame["share"], frame["noise_ns"], strict=True
        )
    )


def _steps(run: Measured) -> tuple[RankStep, ...]:
    return tuple(
        RankStep(
            row["rank"],
            row["steps"],
            row["step_ns"],
            None if math.isnan(row["noise_ns"]) else row["noise_ns"],
            tuple(row[f"q{i}"] for i in range(len(QUANTILES))),
        )
        for row in _rows(run, spread)
    )


def _work(run: Measured) -> tuple[Work, ...]:
    return tuple(
        Work(row["kind"], str(row["name"]), *(float(row[c]) for c in ("calls", "ns", "noise_ns")))
        for row in _rows(run, work_means)
    )


def _exchanges(run: Measured) -> tuple[Exchange, ...]:
    return tuple(
        Exchange(
            row["collective"],
            row["ranks"],
            size_class(row["size"]),
            row["count"],
            row["transfer_ns"],
            None if math.isnan(row["wait_ns"]) else row["wait_ns"],
            None if math.isnan(row["busbw"]) else row["busbw"],
        )
        for row in _rows(run, exchanged)
    )


def _blame(run: Measured) -> tuple[Blame, ...]:
    try:
        frame, step = run.frame(blame), mean_step_ns(run)
    except (NotMeasured, MeasureFailed):
        return ()
    return tuple(
        Blame(int(r), int(by), str(c), float(n), float(n) / step)
        for r, by, c, n in zip(frame["rank"], frame["culprit"], frame["category"], frame["ns"], strict=True)
    )


def rule_named(rules: Iterable[Rule], name: str) -> Rule:
    """Return the rule of an id; raise DlprofError with the ids there are."""
    by_id = {r.id: r for r in rules}
    if name not in by_id:
        raise DlprofError(f"no rule {name!r}; there are: {', '.join(sorted(by_id))}")
    return by_id[name]
