"""Which changes are tried: those of a report's findings, further obvious ones, and those that the user names.

A change is tried only as a whole: it is left out if a part of it can neither be set from outside the script nor be made
by an edit of it. Changes that only print more are left out, too, and those that gain too little to be seen. Changes of
the training itself are tried only if the user names them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dlprof import overrides
from dlprof.analysis.settings import loader_of
from dlprof.analysis.source.patches import kind_of
from dlprof.errors import DlprofError
from dlprof.overrides import Value
from dlprof.result import TIMELESS, Change, Outcome, Result, Scope
from dlprof.result.tried import Attempt, Of
from dlprof.units import count

# Two recordings of the same job differ by up to 0.9 % on a quiet machine (docs/cost.md): a gain of at least twice that
# is worth an edit.
WORTH = 1.02

# These print more and make nothing faster.
_PRINTS = frozenset(("NCCL_DEBUG", "TORCH_LOGS"))

# Settings whose override has another name or another value.
_RENAMED: Mapping[str, str] = {
    "float32_precision": "torch.float32_matmul_precision",
    "fp32_precision": "torch.float32_matmul_precision",
    "mode": "torch.compile",
}
_VALUES: Mapping[str, str] = {"tf32": "high", "bfloat16": "bf16", "float16": "fp16"}

# Overrides that exclude each other.
_SAME = (("env.OMP_NUM_THREADS", "torch.num_threads"), ("optimizer.fused", "optimizer.foreach"))


@dataclass(frozen=True)
class Candidate:
    """A change to try: overrides by name, the findings that name it, and the predicted speed-up (times faster).

    `bound`: the most that it may be where nothing more is known; it counts for the order alone.
    """

    settings: Mapping[str, Value]
    findings: tuple[str, ...] = ()
    predicted: float | None = None
    of: Of = "step"
    numerics: bool = False
    bound: float | None = field(default=None, compare=False)

    def excludes(self, others: Iterable[str]) -> bool:
        """Return whether it cannot be combined with one of these overrides."""
        others = set(others)
        mine = set(self.settings)
        return bool(mine & others) or any(mine & set(same) and others & set(same) for same in _SAME)


@dataclass(frozen=True)
class Plan:
    """The changes to try, the most promising first, and those that are not tried, with the reason."""

    candidates: tuple[Candidate, ...]
    left_out: tuple[Attempt, ...] = ()
    skipped: tuple[str, ...] = ()  # changes that cannot be made so, with the reason
    by_hand: Change | None = None  # the most promising change, if it is one of these


Editable = Callable[[Mapping[str, Value]], bool]


def plan(
    result: Result,
    facts: Mapping[str, Any],
    editable: Editable = lambda _settings: False,
    *,
    asked: Iterable[str] = (),
    numbers: Iterable[int] = (),
    only: bool = False,
    obvious: bool,
    allow_numerics: bool,
) -> Plan:
    """Return what to try on the run of a result. `facts` are rank 0's; each string in `asked` is one candidate's
    NAME=VALUE words; `numbers` are places of changes in the result, of which no others are then tried; `only`: none but
    what is asked for. `editable` says whether an edit makes settings.

    Raises DlprofError for a setting or a number that does not exist.
    """
    numbers = tuple(numbers)
    alone = only or bool(numbers)
    found, little, skipped = ([], [], []) if alone else _of_findings(result, editable, _cores(facts))
    more = [_numbered(result, n, editable) for n in numbers]
    more += [Candidate(overrides.parse(words.split())) for words in asked]
    if obvious:
        more += [*little, *(_forecast(result, Candidate(settings)) for settings in _obvious(facts))]
    together: dict[tuple[tuple[str, Value], ...], Candidate] = {}
    for one in (*found, *more):
        key = tuple(sorted(one.settings.items()))
        before = together.get(key)
        if before is None:
            together[key] = one
            continue
        findings = tuple(dict.fromkeys((*before.findings, *one.findings)))
        together[key] = replace(before if before.predicted is not None else one, findings=findings)
    every = [
        replace(one, numerics=one.numerics or bool(overrides.changes_numbers(one.settings)))
        for one in together.values()
    ]
    every.sort(key=lambda c: -(c.predicted or c.bound or 1.0))
    refused = [c for c in every if c.numerics and not allow_numerics]
    left_out = [(c, "the job then computes other numbers; --allow-numerics tries it") for c in refused]
    if not alone:
        few = "it is predicted to gain less than 2 %; --obvious tries it"
        left_out += [(c, few) for c in little if tuple(sorted(c.settings.items())) not in together]
    return Plan(
        tuple(c for c in every if c not in refused),
        tuple(
            Attempt(c.settings, "not_tried", w, c.findings, c.of, c.predicted, numerics=c.numerics) for c, w in left_out
        ),
        tuple(skipped),
        None if alone else _by_hand(result, editable),
    )


def _of_findings(result: Result, editable: Editable, cores: int) -> tuple[list[Candidate], list[Candidate], list[str]]:
    """Return what to try, what gains too little, and why the rest cannot be tried."""
    found: list[Candidate] = []
    little: list[Candidate] = []
    skipped = []
    for outcome in result.found:
        if (unsure := _unsure(result, outcome, cores)) is not None:
            found.append(unsure)
        elif outcome.changes and not any(change.settings for change in outcome.changes):
            skipped.append(f"{outcome.id}: only an edit by hand does it: {outcome.changes[0].text}")
        for place, change in enumerate(outcome.changes):
            if change.training or not change.settings or all(s.name in _PRINTS for s in change.settings):
                continue
            try:
                settings = _settings_of(change, editable)
            except DlprofError as e:
                skipped.append(f"{outcome.id}: {e}")
                continue
            of = _of(outcome.scope, (outcome.id,))
            predicted = _predicted(result, outcome, change, place)
            bound = outcome.speedup if outcome.at_most and not place else None
            one = Candidate(settings, (outcome.id,), predicted, of, change.numerics, bound)
            worth = outcome.scope not in TIMELESS and (predicted or outcome.speedup) >= WORTH
            (found if worth else little).append(one)
    return found, little, skipped


def _unsure(result: Result, outcome: Outcome, cores: int) -> Candidate | None:
    """Return the workers that are forecast to be best where a finding leaves open whether they are: a run will tell."""
    known = [f for f in outcome.forecasts if f.setting == "num_workers" and 0 < int(f.value) <= cores]
    best = min(known, key=lambda f: f.step_ns, default=None)
    if best is None or result.window is None or any(change.settings for change in outcome.changes):
        return None
    if best.step_ns > result.window.step_ns:
        return None  # they are slower: of four such that were tried, none was faster
    settings: dict[str, Value] = {"loader.num_workers": int(best.value), "loader.persistent_workers": True}
    return Candidate(settings, (outcome.id,), result.window.step_ns / best.step_ns)


def _numbered(result: Result, number: int, editable: Editable) -> Candidate:
    """Return the change that a user names by its place in the result."""
    if not 1 <= number <= len(result.changes):
        raise DlprofError(f"--change {number}: the report proposes {count(len(result.changes), 'change')}")
    one = result.changes[number - 1]
    try:
        settings = _settings_of(one.change, editable)
    except DlprofError as e:
        raise DlprofError(f"--change {number} ({one.change.text}): {e}") from None
    predicted = None if one.at_most else one.speedup
    of = _of(one.scope, one.findings)
    return Candidate(settings, one.findings, None if of == "start" else predicted, of, one.change.numerics)


def _of(scope: Scope, findings: Sequence[str]) -> Of:
    """Return by what a change is measured that these findings name."""
    return "start" if "slow_start" in findings else "loop" if scope == "job" else "step"


def _settings_of(change: Change, editable: Editable) -> dict[str, Value]:
    """Return what makes a change: overrides, or what an edit does, by the kind of call and the keyword.

    Raises DlprofError if neither makes all of it.
    """
    if all(s.name in _PRINTS for s in change.settings):
        raise DlprofError("no setting makes it faster, only an edit by hand")
    try:
        return overrides.parse(f"{name}={value}" for name, value in _named(change).items())
    except DlprofError as e:
        kinds = {s.name: kind_of(s.name) for s in change.settings}
        edit = {f"{kinds[s.name]}.{s.name}": s.to for s in change.settings if kinds[s.name] and s.to is not None}
        if edit and len(edit) == len(change.settings) and editable(edit):
            return edit
        why = f" ({change.no_diff})" if change.no_diff else ""
        raise DlprofError(f"{e}, and no edit does it{why}" if edit else str(e)) from None


def _by_hand(result: Result, editable: Editable) -> Change | None:
    """Return the change that is predicted to gain most, if it cannot be tried; None: it can."""
    of_findings = (one.changes[0] for one in result.found if one.changes)
    first = next((p.change for p in result.changes if not p.training), next(of_findings, None))
    try:
        if first and not first.training:
            _settings_of(first, editable)
    except DlprofError:
        return first
    return None


def named(change: Change) -> dict[str, str] | None:
    """Return the words for `--set` that make a change, by name; None if it cannot be made so."""
    if change.training or not change.settings or all(s.name in _PRINTS for s in change.settings):
        return None
    try:
        words = _named(change)
        overrides.parse(f"{name}={value}" for name, value in words.items())
    except DlprofError:
        return None
    return words


def values_of(change: Change) -> dict[str, Value] | None:
    """Return the same as an attempt holds them."""
    words = named(change)
    return None if words is None else overrides.parse(f"{name}={value}" for name, value in words.items())


def _named(change: Change) -> dict[str, str]:
    """Return a change's settings by the names of overrides; raise DlprofError if one has no such name or no value."""
    values = {s.name: s.to for s in change.settings if s.name not in _PRINTS}
    found: dict[str, str] = {}
    if values.pop("autocast_enabled", None) is True:
        values.setdefault("autocast_dtype", "bfloat16")
    for setting, value in values.items():
        name = "torch.autocast" if setting == "autocast_dtype" else _RENAMED.get(setting) or overrides.named(setting)
        if name is None:
            raise DlprofError(f"{setting} cannot be set from outside the script")
        if value is None:
            raise DlprofError(f"no value of {setting} is proposed")
        found[name] = _VALUES.get(str(value), str(value))
    return found


def _predicted(result: Result, outcome: Outcome, change: Change, place: int) -> float | None:
    """Return the predicted speed-up of a change, from its own forecast or else from the finding's saving.

    The saving is that of the finding's first change. None if the saving is only an upper bound.
    """
    forecasts = {(f.setting, f.value): f.step_ns for f in outcome.forecasts}
    for setting in change.settings:
        step = forecasts.get((setting.name, str(setting.to)))
        if step and result.window:
            return result.window.step_ns / step
    if place or outcome.at_most or outcome.scope in TIMELESS or not 1 < outcome.speedup < 1e6:
        return None
    return outcome.speedup


def _forecast(result: Result, one: Candidate) -> Candidate:
    """Return a candidate with the step that a rule forecasts for it, whether or not that rule found anything."""
    for outcome in result.outcomes:
        for f in outcome.forecasts:
            name = overrides.named(f.setting)
            if name is None or name not in one.settings or f.step_ns <= 0 or result.window is None:
                continue
            if str(one.settings[name]) == f.value:
                return replace(one, predicted=result.window.step_ns / f.step_ns)
    return one


def _obvious(facts: Mapping[str, Any]) -> Iterator[dict[str, Value]]:
    """Return settings that are worth trying on any job and that this one does not have yet."""
    device, cores = (facts.get("device") or {}).get("type"), _cores(facts)
    loader = loader_of(facts)
    if loader:
        now = loader.get("num_workers") or 0
        for workers in sorted({0, 1, 2, cores} - {now}):
            more: dict[str, Value] = {"loader.persistent_workers": True} if workers and not now else {}
            yield {"loader.num_workers": workers, **more}
        if now and loader.get("persistent_workers") is False:
            yield {"loader.persistent_workers": True}
        if device not in (None, "cpu") and loader.get("pin_memory") is False:
            yield {"loader.pin_memory": True}
    threads = (facts.get("cpu") or {}).get("torch_threads")
    for n in sorted({1, cores} - {threads}):
        yield {"env.OMP_NUM_THREADS": str(n)}
    if any(not o.get("fused") for o in facts.get("optimizers") or []):
        yield {"optimizer.fused": True}
    if facts.get("models"):
        yield {"model.memory_format": "channels_last"}
        yield {"torch.autocast": "bf16"}
        yield {"torch.compile": "default"}
    if device not in (None, "cpu"):
        yield {"torch.cudnn_benchmark": True}
        yield {"copy.non_blocking": True}
        yield {"torch.float32_matmul_precision": "high"}
    yield {"gc.freeze": True}


def _cores(facts: Mapping[str, Any]) -> int:
    """Return how many cores a rank has for itself."""
    cpu = facts.get("cpu") or {}
    given = cpu.get("affinity") or cpu.get("count") or os.cpu_count() or 1
    return max(1, int(min(given, cpu.get("quota") or given)) // max(1, facts.get("world_size") or 1))
