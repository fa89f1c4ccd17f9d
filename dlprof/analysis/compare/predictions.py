"""What run A predicted for the changes of run B, checked against what B measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dlprof.analysis.compare.settings_diff import Setting
from dlprof.analysis.compare.significance import LEAST_NOISE, Difference
from dlprof.result import Outcome, Result

# better: B is faster than predicted; partly: it gained, but less; missed: it gained nothing; unknown: B is another
# program, of whose gain the changes' is some part.
CameTrue = Literal["better", "as_predicted", "partly", "missed", "unknown"]


@dataclass(frozen=True)
class Prediction:
    """What A predicted for the changes of B, and what B measured; ns of the mean step.

    The prediction is between `least_ns` and `most_ns`: savings of several findings overlap. `reached` is the share of
    the least gain predicted that was measured; `noise_ns` is the measured gain's standard error.
    """

    findings: tuple[str, ...]
    changed: tuple[str, ...]  # "num_workers 0 → 2"
    least_ns: float
    most_ns: float
    measured_ns: float
    noise_ns: float | None
    reached: float | None  # None: no gain was predicted
    verdict: CameTrue
    basis: str  # which findings predicted it, and for which settings
    also_changed: tuple[str, ...]  # without a prediction


def proposals(outcome: Outcome) -> dict[str, str]:
    """Return the settings that a finding's changes set, with the values proposed; "" where none is."""
    named: dict[str, str] = {}
    for change in outcome.changes:
        for setting in change.settings:
            named.setdefault(setting.name, "" if setting.to is None else str(setting.to))
    return named


def prediction(
    a: Result, b: Result, step: Difference, settings: Iterable[Setting], *, other_code: bool = False
) -> Prediction | None:
    """Check A's predictions: those of the findings whose settings were changed, or which are gone in B.

    None where A predicted nothing for the changes. `other_code`: the code of B differs in more than these.
    """
    assert step.a_ns is not None
    assert step.b_ns is not None
    differ = {
        s.name.rpartition(".")[2].replace(" ", "_"): s
        for s in settings
        if s.section not in ("Job", "Software", "Environment")
    }
    differ |= {s.name: s for s in settings if s.section == "Environment"}
    gone = {o.id for o in b.outcomes if o.state in ("clear", "does_not_apply")}
    taken: list[tuple[Outcome, float, str]] = []
    changed: dict[str, None] = {}
    names: set[str] = set()
    for o in sorted((o for o in a.found if o.scope == "step" and o.saving_ns > 0), key=lambda o: o.id not in gone):
        named = _followed(o, differ)
        # A setting that removed one bottleneck is not expected to save what other findings predict for it.
        if o.id not in gone and named.keys() <= names:
            continue
        forecast = next((f for f in o.forecasts if f.setting in named and f.value == differ[f.setting].b), None)
        if forecast is None and _saves_otherwise(o, named):
            continue
        names |= named.keys()
        changed.update(dict.fromkeys(f"{n} {_values(differ[n])}" for n in named))
        if forecast is not None:
            # Several findings may forecast the same: one change, one gain.
            if any(f == forecast for one, *_ in taken for f in one.forecasts):
                continue
            taken.append((o, step.a_ns - forecast.step_ns, f"for {forecast.setting}={forecast.value}"))
        else:
            other = [f"{n}={v}" for n, v in named.items() if v and differ[n].b != v]
            taken.append((o, o.saving_ns, f"for {', '.join(other)}, not what B has" if other else ""))
    if not taken:
        return None
    gains = [gain for _, gain, _ in taken]
    total = sum(max(g, 0.0) for g in gains)
    if a.together is not None and len(taken) > 1:
        total = min(total, a.together.saving_ns)
    most, least = max(gains), max(total, *gains) if len(gains) > 1 else gains[0]
    gain = step.a_ns - step.b_ns
    within = max(step.least_ns, LEAST_NOISE * (step.noise_ns or 0.0))
    verdict: CameTrue
    if other_code:
        verdict = "unknown"
    elif gain >= most - within:
        verdict = "better" if gain > least + within else "as_predicted"
    else:
        verdict = "partly" if gain > within else "missed"
    return Prediction(
        findings=tuple(o.id for o, _, _ in taken),
        changed=tuple(changed),
        least_ns=step.a_ns - least,
        most_ns=step.a_ns - most,
        measured_ns=step.b_ns,
        noise_ns=step.noise_ns,
        reached=gain / most if most > 0 and not other_code else None,
        verdict=verdict,
        basis="; ".join(", ".join(filter(None, (o.id, what))) for o, _, what in taken),
        also_changed=tuple(f"{s.name} {_values(s)}" for n, s in differ.items() if n not in names),
    )


def _saves_otherwise(o: Outcome, named: Mapping[str, str]) -> bool:
    """Return whether a finding's saving is that of another change than these settings, which it has forecasts for.

    The saving is the first change's: cheaper samples, say, beside which more workers would give less.
    """
    first = {setting.name for change in o.changes[:1] for setting in change.settings}
    return any(f.setting in named for f in o.forecasts) and not named.keys() & first


def _values(s: Setting) -> str:
    return f"{s.a or 'not set'} → {s.b or 'not set'}"


def _followed(o: Outcome, differ: Mapping[str, Setting]) -> dict[str, str]:
    """Return the changed settings of a finding's advice and forecasts, unless they were as advised in A only.

    Each with the value that the advice proposes, "" where it does not name the setting. A forecast has the fact's name
    of a setting, which may differ from the advice's: n_microbatches.
    """
    named = {f.setting: "" for f in o.forecasts} | proposals(o)
    return {n: v for n, v in named.items() if n in differ and not differ[n].a == v != differ[n].b}
