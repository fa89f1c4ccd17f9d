"""Asks every rule about a run and puts what they say into one result.

A rule answers exactly one of four: found, clear, not measured (why), error (what). One that raises costs only its own
row. The saving is the severity: there is no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import pandas as pd

from dlprof import __version__
from dlprof.analysis import notices, overview
from dlprof.analysis.communication.bandwidth import size_class
from dlprof.analysis.engine import Maybe, Measured, MeasureFailed, Progress, measure
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Rule
from dlprof.analysis.panel import drawn
from dlprof.analysis.panels import PICTURES
from dlprof.analysis.step.spread import LEAST_NOISE
from dlprof.analysis.together import Basis, Piece, pieces, speedup, together
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read.run import Run
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
    Window,
    Work,
)
from dlprof.units import duration, percent

# Of what varies more than that, the least that the measured steps show is told: from where tools grade a loss as
# notable.
LEAST_SHARE_OF_VARYING = 0.05


def diagnose(run: Run, rules: Sequence[Rule], jobs: int | None = None, progress: Progress | None = None) -> Result:
    """Measure a run, ask every rule, and return the result."""
    return diagnosed(measure(run, wanted(rules), jobs, progress), rules)


def wanted(rules: Iterable[Rule]) -> list[Any]:
    """Return what must be measured for a diagnosis."""
    asked: list[Any] = [r.check for r in rules]
    asked += [partial(r.explain, None) for r in rules]  # but for the estimate, which it is given
    asked += [p.draw for p in PICTURES]
    asked += [Basis, _window, _device, _time, _blame, _steps, _work, _exchanges]
    return [*asked, *overview.SECTIONS, notices.warnings]


def diagnosed(measured: Measured, rules: Sequence[Rule]) -> Result:
    """Ask every rule about a run that was measured, and return the result."""
    basis = measured.call(Basis)
    asked = [_ask(rule, measured, basis) for rule in rules]
    outcomes = [outcome for outcome, _ in asked]
    order = {"found": 0, "clear": 1, "not_measured": 2, "error": 3}
    outcomes.sort(key=lambda o: (order[o.state], -o.saving_ns, o.id))
    # What a finding shows is not shown twice.
    shown = [o.evidence for o in outcomes if o.evidence]
    return Result(
        run=overview.run_info(measured.job, notices.all_warnings(measured)),
        window=measured.call(_window),
        device=measured.call(_device),
        time=measured.call(_time),
        outcomes=tuple(outcomes),
        together=together(basis, [(o, mine) for o, mine in asked if o.state == "found"]),
        panels=tuple(p for p in drawn(measured, PICTURES) if p not in shown),
        facts=overview.facts(measured),
        dlprof=__version__,
        blame=measured.call(_blame),
        steps=measured.call(_steps),
        work=measured.call(_work),
        exchanges=measured.call(_exchanges),
    )


def _ask(rule: Rule, run: Measured, basis: Basis) -> tuple[Outcome, list[Piece]]:
    """Return what becomes of a rule, and the pieces of what it saves."""

    def outcome(state: str, **said: object) -> Outcome:
        return Outcome(**{"id": rule.id, "state": state, "title": rule.title, "manual": rule.manual, **said})  # type: ignore[arg-type]

    try:
        estimate = run.call(rule.check)
        _check_figures(estimate)
        if estimate.scope == "risk":
            state, said = _risk(rule, run, estimate)
        else:
            state, said = _judged(rule, run, basis, estimate)
        found = outcome(state, **said)
    except NotMeasured as e:
        return outcome("not_measured", why=str(e)), []
    except MeasureFailed as e:
        return outcome("error", why=str(e)), []
    except Exception as e:  # noqa: BLE001 - one rule's fault costs only its own row
        return outcome("error", why=f"{type(e).__name__}: {e}"), []
    saves = state == "found" and estimate.scope != "risk"
    return found, pieces(rule, found.saving_ns, estimate.within) if saves else []


def _judged(rule: Rule, run: Measured, basis: Basis, estimate: Estimate) -> tuple[str, dict[str, object]]:
    """Return whether a bottleneck is found or clear, and the fields of its outcome.

    Raises NotMeasured where what it costs varies too much to tell.
    """
    step = basis.loop_step_ns.get() if estimate.scope == "job" else basis.mean_step_ns.get()
    of = "of the training loop's time" if estimate.scope == "job" else basis.of_step.get()
    fed = basis.fed_ns.get() if estimate.scope == "step" and not rule.feeds else 0.0
    unfed = max(step - fed, 0.0)
    most = min(step, basis.most_ns(rule.saves_from), unfed)
    saving = max(min(estimate.saving_ns, most), 0.0)
    share = saving / step if step else 0.0
    lost = (estimate.saving_ns if estimate.lost_ns is None else estimate.lost_ns) / step if step else 0.0
    loses = f"{percent(lost)} {of} {estimate.loses}"
    slow_loader = f"the loaders feed a step every {duration(fed)} at the best" if fed and most == unfed else ""
    said = {**_figures(estimate), "saving_ns": saving, "share": share, "speedup": speedup(share), "lost_share": lost}
    notable = rule.notable if estimate.notable is None else estimate.notable
    if estimate.clear or estimate.saving_ns < notable * step or share < LEAST_SHARE:
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
        said |= {"saving_ns": saving, "share": share, "speedup": speedup(share)}
    explained = _explained(rule, run, estimate)
    explained["verdict"] = verdict = explained["verdict"] or f"{loses}."
    # What is cut by less than a part in a hundred was rounding, or the trace's own spread.
    if estimate.saving_ns > 1.01 * most:
        cut = f", as {slow_loader}" if slow_loader else " to what the step has of it, waiting for it included"
        explained["sure"] = f"{explained['sure']} Cut{cut}.".strip()
    if varied:
        explained["sure"] = f"{explained['sure']} {varied}"
        explained["verdict"] = f"At least {percent(share)} {of} would be saved: {lowered(str(verdict))}"
    return "found", said | explained


def _risk(rule: Rule, run: Measured, estimate: Estimate) -> tuple[str, dict[str, object]]:
    """Return the same of what may end the job: there is no share of the step to judge it by."""
    figures = _figures(estimate) | {"by_rank": ()}  # which ranks it may happen to; it costs them no time
    if estimate.clear:
        return "clear", {**figures, "summary": estimate.summary}
    return "found", figures | _explained(rule, run, estimate)


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


def _explained(rule: Rule, run: Measured, estimate: Estimate) -> dict[str, object]:
    explanation = run.call(rule.explain, estimate)
    for row in explanation.evidence.rows if explanation.evidence else ():
        for cell in row:
            _check_value(cell)
    return {f.name: getattr(explanation, f.name) for f in fields(explanation)}


def lowered(sentence: str) -> str:
    """Return a sentence so that it can follow a colon; what begins with a number stays as it is."""
    return sentence[:1].lower() + sentence[1:]


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


def _rows(frame: Maybe[pd.DataFrame]) -> list[dict[Any, Any]]:
    """Return a measure's rows, each a dictionary of plain Python values; none where it was not measured."""
    known = frame.or_none()
    return [] if known is None else list(known.to_dict("records"))


def _window(
    step_means: Maybe[pd.DataFrame],
    mean_step_ns: Maybe[float],
    spread: Maybe[pd.DataFrame],
    device_lag: Maybe[pd.DataFrame],
    arithmetic: Maybe[pd.DataFrame],
) -> Window | None:
    means = step_means.or_none()
    if means is None:
        return None
    overhead, lag = means["overhead"].mean(), device_lag.or_none()
    computed = arithmetic.or_none()
    figures = {} if computed is None else computed[["flops", "mfu"]].mean().dropna().to_dict()
    return Window(
        steps=int(means["steps"].min()),
        source="steps" if (means["source"] == "steps").all() else "trace",
        step_ns=mean_step_ns.get(),
        overhead=None if pd.isna(overhead) else float(overhead),
        unit="step" if (means["unit"] == "step").all() else "trace",
        traced_steps=int(means["traced_steps"].min()),
        noise_ns=_noise(spread.or_none()),
        lag_ns=None if lag is None else float(lag["lag_ns"].mean()),
        **{str(name): float(value) for name, value in figures.items()},
    )


def _noise(spread: pd.DataFrame | None) -> float | None:
    """Return the standard error of the run's mean step, ns. Ranks that wait for each other err together: no smaller one
    for there being many of them.
    """
    if spread is None or spread["noise_ns"].isna().any():
        return None
    return float(spread["noise_ns"].mean())


def _device(device_time: Maybe[pd.DataFrame]) -> tuple[DeviceTime, ...]:
    return tuple(DeviceTime(**{str(k): int(v) for k, v in row.items()}) for row in _rows(device_time))


def _time(breakdown: Maybe[pd.DataFrame]) -> tuple[TimePart, ...]:
    frame = breakdown.or_none()
    if frame is None:
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


def _steps(spread: Maybe[pd.DataFrame]) -> tuple[RankStep, ...]:
    return tuple(
        RankStep(
            row["rank"],
            row["steps"],
            row["step_ns"],
            None if math.isnan(row["noise_ns"]) else row["noise_ns"],
            tuple(row[f"q{i}"] for i in range(len(QUANTILES))),
        )
        for row in _rows(spread)
    )


def _work(work_means: Maybe[pd.DataFrame]) -> tuple[Work, ...]:
    return tuple(
        Work(row["kind"], str(row["name"]), *(float(row[c]) for c in ("calls", "ns", "noise_ns")))
        for row in _rows(work_means)
    )


def _exchanges(exchanged: Maybe[pd.DataFrame]) -> tuple[Exchange, ...]:
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
        for row in _rows(exchanged)
    )


def _blame(blame: Maybe[pd.DataFrame], mean_step_ns: Maybe[float]) -> tuple[Blame, ...]:
    frame, step = blame.or_none(), mean_step_ns.or_none()
    if frame is None or step is None:
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
