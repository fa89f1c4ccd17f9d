"""Asks every rule about a run and makes the result.

The outcome of a rule is found, clear, not measured (why), does not apply (why) or error (what). One that raises costs
only its own outcome.
The saving is the severity: there is no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from msgspec.structs import asdict, replace

from dlprof.analysis import notices, settings
from dlprof.analysis.engine import Job, Measure, Measured, MeasureFailed, all_needed, measure
from dlprof.analysis.estimate import BESIDES, COMPILED, LEAST_CAUSE, LEAST_SHARE, UNKNOWN, Estimate, Rule, error_of
from dlprof.analysis.figures import FIELDS, SECTIONS, facts, run_info
from dlprof.analysis.idioms import of_advice
from dlprof.analysis.panel import drawn
from dlprof.analysis.panels import PICTURES
from dlprof.analysis.proposals import Basis, Piece, combined_saving, pieces, proposals, speedup
from dlprof.analysis.source.where import Source, each_line_once, placed
from dlprof.analysis.step.breakdown import part_least, part_noise
from dlprof.analysis.step.savings import LEAST_NOISE, saving
from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.marks import __version__
from dlprof.read.run import Run
from dlprof.result import MOST_RANKS, TIMELESS, Outcome, RankCost, Result
from dlprof.units import duration, percent

# A saving that is not significant is found where each measured step shows at least this share of the step: from where
# tools grade a loss as notable.
LEAST_SHARE_OF_VARYING = 0.05


def diagnose(run: Run, rules: Sequence[Rule], jobs: int | None = None) -> Result:
    """Measure a run, ask every rule, and return the result."""
    return diagnosed(measure(run, wanted(rules), jobs), rules)


def wanted(rules: Iterable[Rule]) -> list[Any]:
    """Return what must be measured for a diagnosis."""
    needed: list[Any] = [r.check for r in rules]
    needed += [r.explain for r in rules]
    needed += [p.draw for p in PICTURES]
    needed += [Basis, Source, *FIELDS.values()]
    return [*needed, *SECTIONS, notices.warnings]


def every_frame(rules: Iterable[Rule]) -> list[Measure[pd.DataFrame]]:
    """Return the measures that a diagnosis is made from, directly or not, as far as they are frames that travel."""
    return [measure for measure in all_needed(wanted(rules)) if measure.is_frame and measure.travels]


def diagnosed(measured: Measured, rules: Sequence[Rule]) -> Result:
    """Ask every rule about a run that was measured, and return the result."""
    basis = measured.call(Basis)
    answered = [_ask(rule, measured, basis) for rule in rules]
    source = measured.call(Source)
    lines = {rule.id: rule.saves_from for rule in rules}
    outcomes = [placed(o, lines[o.id], source) if o.state == "found" else o for o, _ in answered]
    order = {"found": 0, "clear": 1, "not_measured": 2, "does_not_apply": 3, "error": 4}
    first = {o.id for o in outcomes if o.state == "found" and o.scope == "failure"}
    rank_of = _ranks(outcomes, rules, settings.on_gpu(measured.job))
    by = sorted(outcomes, key=lambda o: (order[o.state], o.training, o.id not in first, *rank_of[o.id], o.id))
    outcomes = each_line_once(by)
    shown = [o.evidence for o in outcomes if o.evidence]  # and not once more as panels of the run
    of_host = {rule.id for rule in rules if rule.of_host}
    mine = {o.id: of for o, of in answered}
    figures: dict[str, Any] = {name: measured.call(make) for name, make in FIELDS.items()}
    return Result(
        run=run_info(measured.job, notices.all_warnings(measured)),
        outcomes=tuple(outcomes),
        together=combined_saving(
            basis, [(o, mine) for o, mine in answered if o.state == "found" and not o.training], of_host
        ),
        changes=proposals(basis, [(o, mine[o.id]) for o in outcomes if o.state == "found"], of_host, figures["budget"]),
        panels=tuple(p for p in drawn(measured, PICTURES) if p not in shown),
        facts=facts(measured),
        dlprof=__version__,
        **figures,
    )


def _ranks(outcomes: Sequence[Outcome], rules: Sequence[Rule], on_gpu: bool) -> dict[str, tuple[float, bool]]:
    """Return what outcomes are ordered by: the saving; of a generic one no more than causes of the same time save."""
    by_id = {rule.id: rule for rule in rules}
    found = [o for o in outcomes if o.state == "found" and not o.training]
    causes = [o for o in found if by_id[o.id].of_host and not by_id[o.id].generic]

    def half(o: Outcome) -> bool:
        """Return whether a saving is of what may not be needless: half is expected then."""
        text = o.changes[0].text if o.changes else ""
        unknown = UNKNOWN in text or any(one.informs for one in o.changes[:1])
        return unknown or (o.at_most and (COMPILED in text or (on_gpu and by_id[o.id].generic)))

    expected = {o.id: o.saving_ns * (0.5 if half(o) else by_id[o.id].weight) for o in outcomes}
    keys = {}
    for o in outcomes:
        saving, before = expected[o.id], []
        if by_id[o.id].generic and on_gpu:
            before = [cause.saving_ns for cause in causes if cause.share >= LEAST_CAUSE]
            # A larger one that is mostly in one place of the script's is a cause, too.
            before += [
                expected[one.id]
                for one in found
                if by_id[one.id].generic and one.saving_ns > o.saving_ns and _is_in_one_place(one)
            ]
        elif by_id[o.id].generic and not (_is_in_one_place(o) and _is_known(o)):
            before = [cause.saving_ns for cause in causes if cause.saving_ns >= BESIDES * saving]
        keys[o.id] = (-min([saving, *before]), bool(before))
    return keys


def _is_in_one_place(outcome: Outcome) -> bool:
    """Return whether more than half of the stacks were seen in the first place that a finding names."""
    return bool(outcome.where) and (outcome.where[0].share or 0.0) > 0.5


def _is_known(outcome: Outcome) -> bool:
    """Return whether its first change is the remedy of what a line is known to do."""
    return any(of_advice(change.text) for change in outcome.changes[:1])


def _ask(rule: Rule, run: Measured, basis: Basis) -> tuple[Outcome, list[Piece]]:
    """Return the outcome of a rule, and the pieces of its saving."""

    def outcome(state: str, **of: object) -> Outcome:
        return Outcome(**{"id": rule.id, "state": state, "title": rule.title, "manual": rule.manual, **of})  # type: ignore[arg-type]

    try:
        _check_applies(rule, basis.job)
        estimate = _completed(run.call(rule.check), basis)
        _check_figures(estimate)
        risk = estimate.scope in TIMELESS
        state, judged = _risk(rule, run, estimate) if risk else _judged(rule, run, basis, estimate)
        found = outcome(state, **judged)
    except DoesNotApply as e:
        return outcome("does_not_apply", why=str(e)), []
    except NotMeasured as e:
        return outcome("not_measured", why=str(e)), []
    except MeasureFailed as e:
        return outcome("error", why=str(e)), []
    except Exception as e:  # noqa: BLE001 - one rule's fault costs only its own row
        return outcome("error", why=f"{type(e).__name__}: {e}"), []
    return found, pieces(rule, found.saving_ns, estimate.within) if state == "found" and not risk else []


def _check_applies(rule: Rule, job: Job) -> None:
    """Raise DoesNotApply where the job is not of the kind that the rule is about; NotMeasured: that is not known."""
    if settings.of_inference(job):
        raise DoesNotApply("the traces are of inference, and nothing trains")
    if rule.only_with == "gpu" and settings.on_cpu(job):
        raise DoesNotApply("the job trains on the CPU")
    if rule.only_with == "cpu" and settings.on_gpu(job):
        raise DoesNotApply("the job trains on a GPU")
    if rule.only_with == "cpu" and not settings.on_cpu(job):
        raise NotMeasured("whether the job trains on the CPU is not known")
    if rule.only_with == "loader" and settings.lacks_loader(job):
        raise DoesNotApply("no DataLoader was seen")


def _completed(estimate: Estimate, basis: Basis) -> Estimate:
    """Return an estimate with its saving and its noise, where it says only what they are made of."""
    made: dict[str, Any] = {}
    if estimate.gone_ns:
        made["saving_ns"] = saving(basis.own_time.get(), estimate.gone_ns)
        made["by_rank_ns"] = estimate.gone_ns
    if estimate.noise_of and not estimate.unknown:
        made["noise_ns"] = part_noise(basis.breakdown.get(), *estimate.noise_of)
    if estimate.least_of:
        made["least_ns"] = part_least(basis.breakdown.get(), *estimate.least_of)
    return replace(estimate, **made)


def _judged(rule: Rule, run: Measured, basis: Basis, estimate: Estimate) -> tuple[str, dict[str, object]]:
    """Return whether a bottleneck is found or clear, and the fields of its outcome.

    Raises NotMeasured where its cost varies too much.
    """
    step = basis.length_ns(estimate.scope)
    of = {"job": "of the training loop's time", "run": "of the run"}.get(estimate.scope) or basis.of_step.get()
    fed = basis.fed_ns.get() if estimate.scope == "step" and not rule.feeds else 0.0
    unfed = max(step - fed, 0.0)
    most = min(step, basis.most_ns(rule.saves_from if estimate.scope == "step" else ()), unfed)
    saving = max(min(estimate.saving_ns, most), 0.0)
    share = saving / step if step else 0.0
    lost = (estimate.saving_ns if estimate.lost_ns is None else estimate.lost_ns) / step if step else 0.0
    loses = f"{percent(lost)} {of} {estimate.loses}"
    if lost > 1 and estimate.scope == "step":  # the mean step is that of no rank: some are much longer than others
        longest, rank = basis.longest()
        lost = min(lost * step / longest, 1.0)
        loses = f"{percent(lost)} {of} of rank {rank} {estimate.loses}"
    slow_loader = f"the loaders need at least {duration(fed)} a step" if fed and most == unfed else ""
    figures = {**_figures(estimate), "saving_ns": saving, "share": share, "speedup": speedup(share), "lost_share": lost}
    notable = rule.notable if estimate.notable is None else estimate.notable
    if estimate.unknown and max(estimate.by_rank_ns.values(), default=0.0) >= notable * step:
        raise NotMeasured(f"{estimate.summary}; {estimate.unknown}")
    if estimate.clear or estimate.unknown or estimate.saving_ns < notable * step or share < LEAST_SHARE:
        summary = estimate.summary or loses
        return "clear", {**figures, "summary": f"{summary}: {slow_loader}" if slow_loader and share else summary}
    varied = ""
    if saving < LEAST_NOISE * estimate.noise_ns:
        varies = f"{percent(share)} {of} ± {percent(estimate.noise_ns / step)}"
        saving = min(max(saving - LEAST_NOISE * estimate.noise_ns, estimate.least_ns), saving)
        share = saving / step
        if share < LEAST_SHARE_OF_VARYING:
            raise NotMeasured(f"{varies}: it varies too much between the measured steps; record more of them")
        varied = f"The mean saving is {varies}; the one given is the least that the measured steps show."
        figures |= {"saving_ns": saving, "share": share, "speedup": speedup(share)}
    explained = _explained(rule, run, estimate)
    explained["verdict"] = verdict = explained["verdict"] or f"{loses}."
    # Less than a part in a hundred is rounding, or the trace's own spread.
    if estimate.saving_ns > 1.01 * most:
        cap = f", as {slow_loader}" if slow_loader else " at the step's time in it, including waits for it"
        explained["sure"] = f"{explained['sure']} Capped{cap}.".strip()
        explained["at_most"] = True
    if not explained["at_most"]:
        # A bound has no range.
        alone = estimate.scope == "step" and basis.of_one_step
        noise = math.inf if alone else estimate.noise_ns
        figures |= {"error_ns": error_of(saving, step, noise, rule.error)}
        if alone:
            explained["sure"] = f"{explained['sure']} Of one steady step: how much steps vary is not known.".strip()
    if varied:
        explained["sure"] = f"{explained['sure']} {varied}"
        explained["verdict"] = f"At least {percent(share)} {of} would be saved: {lowered(str(verdict))}"
        explained["at_most"] = False
    return "found", figures | explained


def _risk(rule: Rule, run: Measured, estimate: Estimate) -> tuple[str, dict[str, object]]:
    """Return the same for a risk, which costs no time: it has no share of the step."""
    figures = _figures(estimate) | {"by_rank": ()}  # by_rank_ns says which ranks it may happen to
    if estimate.clear:
        return "clear", {**figures, "summary": estimate.summary}
    return "found", figures | _explained(rule, run, estimate)


def _figures(estimate: Estimate) -> dict[str, object]:
    """Return the fields of an outcome, found or clear, that come from an estimate."""
    by_rank = {rank: float(ns) for rank, ns in estimate.by_rank_ns.items() if ns > 0}
    worst = sorted(sorted(by_rank, key=lambda rank: -by_rank[rank])[:MOST_RANKS])
    most = max(by_rank.values(), default=0.0)
    return {
        "scope": estimate.scope,
        "noise_ns": estimate.noise_ns,
        "by_rank": tuple(RankCost(rank, by_rank[rank]) for rank in worst),
        "ranks": tuple(sorted(rank for rank, ns in by_rank.items() if ns >= most / 2)),
    }


def _explained(rule: Rule, run: Measured, estimate: Estimate) -> dict[str, object]:
    explanation = run.call(rule.explain, estimate)
    for row in explanation.evidence.rows if explanation.evidence else ():
        for cell in row:
            _check_value(cell)
    changes = sorted(explanation.changes, key=lambda change: change.training)
    # What may end the job must be cured, by whatever change.
    training = estimate.scope not in TIMELESS and bool(changes) and changes[0].training
    made = asdict(explanation)
    return {**made, "changes": tuple(changes), "training": training}


def lowered(sentence: str) -> str:
    """Return a sentence as it is written after a colon."""
    return sentence[:1].lower() + sentence[1:]


def _check_figures(estimate: Estimate) -> None:
    figures = (estimate.saving_ns, estimate.noise_ns, estimate.least_ns, estimate.lost_ns)
    for value in (*figures, *estimate.within.values(), *estimate.by_rank_ns.values(), *estimate.by_rank_ns):
        _check_value(value)


def _check_value(value: object) -> None:
    """Raise where result.json cannot hold a value: NaN, infinity, types of other libraries."""
    if not isinstance(value, (str, int, float, type(None))):
        raise TypeError(f"{value!r} is a {type(value).__name__}, not text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value!r} among its figures")


def rule_named(rules: Iterable[Rule], name: str) -> Rule:
    """Return the rule of an id; raise DlprofError with the ids there are."""
    by_id = {r.id: r for r in rules}
    if name not in by_id:
        raise DlprofError(f"no rule {name!r}; there are: {', '.join(sorted(by_id))}")
    return by_id[name]
