"""Two results compared: what got faster or slower from run A to run B, and whether the predicted gain was reached.

Two runs by the samples, or tokens, that they train on in a second: whose steps do different work compare by nothing
else. A difference counts only beyond its noise: how the steps of each run vary and drift. What changes from one
recording to the next (another host, other jobs on it) is in no single run; LEAST_SHARE is for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct

from dlprof.plain import command_line
from dlprof.redaction import DROPPED
from dlprof.result import CATEGORIES, MOST_WORK, QUANTILES, TIMELESS, Outcome, Result, Work
from dlprof.result.figures import Throughput
from dlprof.result.stored import plain
from dlprof.units import count, digits, duration, used_by_others

# A difference is significant from twice its standard error and this share of A's step on: two recordings of one job
# with steps of 50 ms were up to 0.9 % apart (docs/cost.md).
LEAST_NOISE = 2.0
LEAST_SHARE = 0.01

NOISE = (
    "±: twice the standard error of the difference, from how the steps of each run vary and drift. A difference below"
    " it, or below 1 % of A's step, is within noise. How much recordings of the same job differ is not part of it."
)

Verdict = Literal["faster", "slower", "noise", "unknown"]


class Difference(Struct, frozen=True):
    """One part of the mean step in both runs, ns; None: not known. `noise_ns`: standard error of b_ns − a_ns."""

    name: str
    a_ns: float | None
    b_ns: float | None
    noise_ns: float | None = None
    least_ns: float = 0.0  # a smaller difference is within noise in any case

    @property
    def ns(self) -> float | None:
        """How much longer B takes, ns."""
        return None if self.a_ns is None or self.b_ns is None else self.b_ns - self.a_ns

    @property
    def verdict(self) -> Verdict:
        """Whether B is faster or slower; unknown where a figure or the noise is."""
        if self.ns is None:
            return "unknown"
        if abs(self.ns) < max(self.least_ns, LEAST_NOISE * (self.noise_ns or 0.0)) or self.ns == 0:
            return "noise"
        if self.noise_ns is None:
            return "unknown"
        return "faster" if self.ns < 0 else "slower"


# Sections of facts that somebody chose or installed; those of the others were measured.
SETTINGS = ("Job", "Device", "Software", "Loader", "Model", "Optimizer", "Pipeline", "Precision", "Environment")
# Different in any two runs.
_NAMES = (("Job", "folder"), ("Job", "ended"))
_COMMAND = ("Job", "command")


class Setting(Struct, frozen=True):
    """One fact that differs; "" where a run does not have it."""

    section: str
    name: str
    a: str
    b: str


def differing(a: Result, b: Result) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """Return the facts that differ: settings, and what was measured."""
    of_a, of_b = ({(f.section, f.name): f.value for f in r.facts} for r in (a, b))
    of_a[_COMMAND], of_b[_COMMAND] = _words_apart(a.run.command, b.run.command)
    differ = [
        Setting(*key, of_a.get(key, ""), of_b.get(key, ""))
        for key in dict.fromkeys((*of_a, *of_b))
        if of_a.get(key) != of_b.get(key) and key not in _NAMES
    ]
    chosen = tuple(s for s in differ if s.section in SETTINGS)
    return chosen, tuple(s for s in differ if s.section not in SETTINGS)


def _words_apart(a: Sequence[str], b: Sequence[str]) -> tuple[str, str]:
    """Return the words of each of two commands that the other one does not have at that place."""
    codes = [code for code in SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if code[0] != "equal"]
    only_a = [word for _, start, end, _, _ in codes for word in a[start:end]]
    only_b = [word for _, _, _, start, end in codes for word in b[start:end]]
    return command_line(only_a), command_line(only_b)


# better: B is faster than predicted; partly: it gained, but less; missed: it gained nothing; unknown: B is another
# program, of whose gain the changes' is some part.
CameTrue = Literal["better", "as_predicted", "partly", "missed", "unknown"]


class Prediction(Struct, frozen=True):
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


FORMAT = 2

# Settings that change the work of a step.
_WORK = (("Loader", "batch size"), ("Model", "parameters"))

# If the rule's answer is one of these, the run does not have the bottleneck.
_WITHOUT = ("clear", "does_not_apply")

State = Literal["gone", "new", "less", "more", "same", "unknown"]


class WorkDifference(Struct, frozen=True):
    """An operator, a kernel or a kind of collective: its time, and its calls per step (None: not there)."""

    time: Difference
    a_calls: float | None
    b_calls: float | None
    wait: Difference | None = None  # of collectives: waiting for other ranks, next to the transfer


class FindingChange(Struct, frozen=True):
    """What became of one bottleneck. gone: B was checked and does not have it; unknown: one run does not know (why)."""

    id: str
    state: State
    title: str
    a_ns: float | None
    b_ns: float | None
    why: str = ""


class Comparison(Struct, frozen=True):
    """All that a renderer may know of two runs. Empty tuples and None: not compared, and `not_compared` says why."""

    a: Result
    b: Result
    findings: tuple[FindingChange, ...]
    settings: tuple[Setting, ...]
    measured: tuple[Setting, ...]  # facts that are no settings, where they differ
    not_compared: tuple[str, ...]
    step: Difference | None = None
    rates: Rates | None = None
    other_work: tuple[str, ...] = ()  # why a step of B is not known to do the work of one of A
    quantiles: tuple[Difference, ...] = ()  # of the steps, the mean over ranks, by QUANTILES; their noise is not known
    ranks: tuple[Difference, ...] = ()
    time: tuple[Difference, ...] = ()  # by category, the mean over ranks
    time_by_rank: tuple[tuple[int, tuple[Difference, ...]], ...] = ()
    ranges: tuple[WorkDifference, ...] = ()
    operators: tuple[WorkDifference, ...] = ()
    kernels: tuple[WorkDifference, ...] = ()
    exchanges: tuple[WorkDifference, ...] = ()
    prediction: Prediction | None = None
    whole: Difference | None = None  # the whole job, or the loop's time for each step; None: not known of both
    code: tuple[str, ...] = ()  # lines of B's files that differ, as "train.py:40-42"
    doubts: tuple[str, ...] = ()  # what a reader must know before trusting the differences


class _Pair(Struct, frozen=True):
    """Two results, and the least difference that counts, ns."""

    a: Result
    b: Result
    least_ns: float

    def difference(self, name: str, a_ns: float | None, b_ns: float | None, *noise: float | None) -> Difference:
        """Return the difference of two figures with these standard errors; without any, its noise is not known."""
        return Difference(name, a_ns, b_ns, _noise(*noise) if noise else None, self.least_ns)


def compare(a: Result, b: Result, code: tuple[str, ...] = ()) -> Comparison:
    """Compare two results; what cannot be compared is left out, with the reason. `code`: see `code.changed`."""
    loops = _loops(a, b)
    if loops is not None:
        a, b = _per_turn(a), _per_turn(b)
    pair = _Pair(a, b, LEAST_SHARE * a.window.step_ns if a.window else 0.0)
    settings, measured = differing(a, b)
    always = partial(Comparison, a, b, _findings(pair), settings, measured, code=code)
    refused = list(_refused(a, b))
    if refused or a.window is None or b.window is None:
        return always(tuple(refused))
    same_ranks = a.run.world_size == b.run.world_size
    if not same_ranks:
        refused.append(
            f"rank by rank: A has {count(a.run.world_size, 'rank')} and B {b.run.world_size}; means over the ranks are"
            " compared,"
            " of steps that may do different work"
        )
    step = pair.difference("step", a.window.step_ns, b.window.step_ns, a.window.noise_ns, b.window.noise_ns)
    by = rates(a, b)
    other_work = tuple(_other_work(by, same_ranks, settings, a, b))
    predictable = same_ranks and a.run.device == b.run.device and not other_work
    time, time_by_rank = _times(pair)
    return always(
        (*refused, *_missing(a, b)),
        step=step,
        rates=by,
        other_work=other_work,
        quantiles=_quantiles(pair),
        ranks=_ranks(pair) if same_ranks else (),
        time=time,
        time_by_rank=time_by_rank if same_ranks else (),
        ranges=_works(pair, "range"),
        operators=_works(pair, "operator"),
        kernels=_works(pair, "kernel"),
        exchanges=_exchanges(pair),
        prediction=prediction(a, b, step, settings, other_code=bool(code)) if predictable else None,
        whole=None if other_work else _whole(pair),
        doubts=(*([loops] if loops else []), *_of_code(code, settings), *_doubts(a, b, other_work, by)),
    )


def _of_code(code: tuple[str, ...], settings: Iterable[Setting]) -> Iterator[str]:
    if code:
        too = " too" if any(settings) else ""
        yield f"your code changed{too}: {'; '.join(code)}: what else was changed gained some part of the difference"


def _whole(pair: _Pair) -> Difference | None:
    """Return the time of the runs, or, of runs of other lengths, what the loop takes for each training step.

    The latter with warming up and traced steps as steady ones, and without setting up; None where it is not known.
    """
    of_a, of_b = ({p.part: (p.steps, p.ns) for p in r.budget} for r in (pair.a, pair.b))
    if not all(of.get("steady", (0, 0))[0] for of in (of_a, of_b)):
        return None

    def total(of: Mapping[str, tuple[float, float]], parts: Iterable[str], cell: int) -> float:
        return sum(of[part][cell] for part in parts if part in of)

    plain_steps = ("steady", "warmup", "traced", "stalled")
    steps = [total(of, (*plain_steps, "epoch_ends"), 0) for of in (of_a, of_b)]
    if abs(steps[0] / steps[1] - 1) <= _SAME_WORK:
        return pair.difference("the whole job", *(total(of, of, 1) for of in (of_a, of_b)))
    loops = [
        (
            total(of, plain_steps, 0) * of["steady"][1] / of["steady"][0]
            + total(of, ("epoch_ends", "validation", "other"), 1)
        )
        / n
        for of, n in zip((of_a, of_b), steps, strict=True)
    ]
    return pair.difference("the training loop, for each step", *loops)


def to_json(c: Comparison) -> dict[str, Any]:
    """Return the comparison as plain data: the differences, and of both runs which they are."""
    data: dict[str, Any] = {"format": FORMAT, "noise": NOISE}
    for name, result in (("a", c.a), ("b", c.b)):
        data[name] = {"run": plain(result.run), "window": plain(result.window) if result.window else None}
    data["step"] = _plain(c.step)
    data["rates"] = {**plain(c.rates), "ratio": c.rates.ratio, "verdict": c.rates.verdict} if c.rates else None
    data["quantiles"] = [_plain(d) for d in c.quantiles]
    data["ranks"] = [_plain(d) for d in c.ranks]
    data["time"] = [_plain(d) for d in c.time]
    data["time_by_rank"] = [{"rank": rank, "time": [_plain(d) for d in of]} for rank, of in c.time_by_rank]
    data["findings"] = [plain(f) for f in c.findings]
    for name, work in (
        ("ranges", c.ranges),
        ("operators", c.operators),
        ("kernels", c.kernels),
        ("collectives", c.exchanges),
    ):
        data[name] = [
            {**(_plain(w.time) or {}), "a_calls": w.a_calls, "b_calls": w.b_calls, "wait": _plain(w.wait)} for w in work
        ]
    data["settings"] = [plain(s) for s in c.settings]
    data["measured"] = [plain(s) for s in c.measured]
    data["whole"], data["code"] = _plain(c.whole), list(c.code)
    data["prediction"] = plain(c.prediction) if c.prediction else None
    return data | {"not_compared": list(c.not_compared), "doubts": list(c.doubts)}


def _plain(d: Difference | None) -> dict[str, Any] | None:
    return {**plain(d), "ns": d.ns, "verdict": d.verdict} if d else None


def _refused(a: Result, b: Result) -> Iterator[str]:
    """Yield the reasons why steps cannot be compared at all."""
    for name, result in (("A", a), ("B", b)):
        if result.window is None:
            yield f"steps and their parts: no steady step was recorded in {name}"
        elif result.window.unit == "trace":
            yield f"steps and their parts: the trace of {name} has no step markers"


# Two loops are the same if their numbers of kernels differ by no more than this share.
_SAME_LOOP = 0.2


def _loops(a: Result, b: Result) -> str | None:
    """Return what two traces without step markers are compared by, if the same loop recurs in both."""
    if a.window is None or b.window is None or {a.window.unit, b.window.unit} != {"trace"}:
        return None
    one, other = a.window.loop, b.window.loop
    if one is None or other is None or abs(one.kernels - other.kernels) > _SAME_LOOP * max(one.kernels, other.kernels):
        return None
    kernels = f"{one.kernels:,}" if one.kernels == other.kernels else f"{one.kernels:,} and {other.kernels:,}"
    return (
        f"nothing marks the steps: a step is here a turn of the loop of {kernels} kernels that recurs {one.often} × in"
        f" A and {other.often} × in B (the median turn: {duration(one.median_ns)} and {duration(other.median_ns)}),"
        " which may be less than a step of the training"
    )


def _per_turn(result: Result) -> Result:
    """Return the result of a trace without step markers, with a mean turn of its loop in place of the whole trace."""
    window = result.window
    assert window is not None
    assert window.loop is not None
    loop, new = window.loop, msgspec.structs.replace
    share = loop.period_ns / window.step_ns
    steps = {s.rank: s for s in result.steps}
    return new(
        result,
        window=new(
            window, unit="step", steps=loop.often, step_ns=loop.period_ns, noise_ns=loop.noise_ns, lengths_ns=()
        ),
        steps=tuple(
            new(s, step_ns=s.step_ns * share, steps=loop.often, noise_ns=loop.noise_ns, quantiles_ns=())
            for s in steps.values()
        ),
        time=tuple(new(t, ns=t.ns * share, noise_ns=t.noise_ns * share) for t in result.time),
        work=tuple(
            new(w, ns=w.ns * share, calls=w.calls * share, noise_ns=loop.noise_ns * w.ns * share / loop.period_ns)
            for w in result.work
        ),
        exchanges=tuple(
            new(
                e,
                count=e.count * share,
                transfer_ns=e.transfer_ns * share,
                wait_ns=None if e.wait_ns is None else e.wait_ns * share,
            )
            for e in result.exchanges
        ),
        outcomes=tuple(
            new(o, saving_ns=o.saving_ns * share, noise_ns=o.noise_ns * share) if o.scope == "step" else o
            for o in result.outcomes
        ),
    )


def _other_work(by: Rates | None, same_ranks: bool, settings: Iterable[Setting], a: Result, b: Result) -> Iterator[str]:
    """Yield the reasons why a step of one run may do other work than one of the other."""
    if by is not None and not by.same_work:
        yield f"a step is of {digits(by.a_per_step)} {by.unit} in A and of {digits(by.b_per_step)} in B"
    if not same_ranks and by is None:
        yield f"A has {count(a.run.world_size, 'rank')} and B {b.run.world_size}"
    micro = [r.window.micro_batches for r in (a, b) if r.window]
    if by is None and len(set(micro)) > 1:
        yield f"a step is of {micro[0]} micro-batches in A and of {micro[1]} in B"
    for s in settings:
        counted = by is not None and s.name == "batch size"
        if (s.section, s.name) in _WORK and s.a and s.b and not counted:
            yield f"{s.name} is {s.a} in A and {s.b} in B"


def _doubts(a: Result, b: Result, other_work: Iterable[str], by: Rates | None) -> Iterator[str]:
    assert a.window is not None
    assert b.window is not None
    if a.run.device != b.run.device:
        yield (
            f"the devices differ ({a.run.device or 'unknown'} and {b.run.device or 'unknown'}): differences may come"
            " from them, and A's predictions are not checked"
        )
    if a.window.source != b.window.source:
        traced, other = ("A", "B") if a.window.source == "trace" else ("B", "A")
        yield (
            f"{traced}'s step is the mean of traced steps, which the profiler slows, {other}'s that of untraced ones:"
            " this alone makes a difference"
        )
    for why in other_work:
        how = "" if by is None else f", so the runs are compared by {by.unit} a second"
        yield f"{why}: steps do different work{how}, and A's predictions are not checked"
    for name, result in (("A", a), ("B", b)):
        load = result.foreign_load
        if load is not None and load.disturbs:
            yield f"in {name} {used_by_others(load.foreign, load.cores, load.waited)}: this alone makes a difference"
        if result.run.missing_ranks:
            n = len(result.run.missing_ranks)
            yield f"{n} of {result.run.world_size} ranks of {name} are missing; means are over the others"
    if all(any(DROPPED in word for word in result.run.command) for result in (a, b)):
        yield f"what the commands show as {DROPPED} was not recorded, and may differ (--keep-arguments records it)"
    if a.window.noise_ns is None or b.window.noise_ns is None:
        yield "the noise of a run with one measured step, or from an older dlprof, is not known"


def _missing(a: Result, b: Result) -> Iterator[str]:
    """Yield the parts of the step that only one of the runs has."""
    for what, of_a, of_b in (
        ("parts of the step", a.time, b.time),
        *((f"{kind}s", _of_kind(a, kind), _of_kind(b, kind)) for kind in ("operator", "kernel")),
        ("collectives", a.exchanges, b.exchanges),
    ):
        if bool(of_a) != bool(of_b):
            yield f"{what}: {'B' if of_a else 'A'} has none"


def _noise(*errors: float | None) -> float | None:
    """Combine independent standard errors; None where one is not known."""
    known = [e for e in errors if e is not None]
    return math.hypot(*known) if len(known) == len(errors) else None


def _ranks(pair: _Pair) -> tuple[Difference, ...]:
    of_b = {s.rank: s for s in pair.b.steps}
    both = [(s, of_b[s.rank]) for s in pair.a.steps if s.rank in of_b]
    return tuple(pair.difference(f"rank {a.rank}", a.step_ns, b.step_ns, a.noise_ns, b.noise_ns) for a, b in both)


def _quantiles(pair: _Pair) -> tuple[Difference, ...]:
    """Return the quantiles of the steps, as the means over the ranks; () where a run has none."""
    of_a, of_b = ([s.quantiles_ns for s in r.steps if len(s.quantiles_ns) == len(QUANTILES)] for r in (pair.a, pair.b))
    if not of_a or not of_b:
        return ()
    means = [[sum(column) / len(of) for column in zip(*of, strict=True)] for of in (of_a, of_b)]
    return tuple(pair.difference(f"{100 * q:.0f} %", x, y) for q, x, y in zip(QUANTILES, *means, strict=True))


Part = tuple[float, float | None]  # ns and its standard error


def _times(pair: _Pair) -> tuple[tuple[Difference, ...], tuple[tuple[int, tuple[Difference, ...]], ...]]:
    """Return the categories' differences, as the mean over the ranks and rank by rank; () where a run has no parts."""
    of_a, of_b = _parts(pair.a), _parts(pair.b)
    if not of_a or not of_b:
        return (), ()
    each = tuple((rank, _categories(pair, of_a[rank], of_b[rank])) for rank in sorted(of_a) if rank in of_b)
    return _categories(pair, _mean(list(of_a.values())), _mean(list(of_b.values()))), each


def _parts(result: Result) -> dict[int, dict[str, Part]]:
    """Return rank → category → part. The noise of a part is at least its share of the step's."""
    steps = {s.rank: s.noise_ns for s in result.steps}
    found: dict[int, dict[str, Part]] = {}
    for p in result.time:
        of_step = steps.get(p.rank)
        noise = _noise(p.noise_ns or None, None if of_step is None else of_step * p.share)
        found.setdefault(p.rank, {})[p.category] = (p.ns, noise)
    return found


def _mean(ranks: list[dict[str, Part]]) -> dict[str, Part]:
    """Return the mean over the ranks, with their mean noise: ranks wait for each other, so it is not independent."""
    found: dict[str, Part] = {}
    for category in dict.fromkeys(c for parts in ranks for c in parts):
        mine = [parts.get(category, (0.0, 0.0)) for parts in ranks]
        noise = [e for _, e in mine if e is not None]
        known = len(noise) == len(mine)
        found[category] = (sum(ns for ns, _ in mine) / len(mine), sum(noise) / len(noise) if known else None)
    return found


def _categories(pair: _Pair, a: Mapping[str, Part], b: Mapping[str, Part]) -> tuple[Difference, ...]:
    rows = []
    for category in [c for c in CATEGORIES if c in a or c in b] + sorted((a.keys() | b.keys()) - set(CATEGORIES)):
        (of_a, noise_a), (of_b, noise_b) = a.get(category, (0.0, 0.0)), b.get(category, (0.0, 0.0))
        rows.append(pair.difference(category, of_a, of_b, noise_a, noise_b))
    return tuple(rows)


def _of_kind(result: Result, kind: str) -> dict[str, Work]:
    return {w.name: w for w in result.work if w.kind == kind}


def _works(pair: _Pair, kind: str) -> tuple[WorkDifference, ...]:
    """Return operators or kernels of both runs, what changed most first; () where only one run has any.

    One that is not among the heaviest of a run takes at most as long as the lightest of these; where it may then take
    as long as in the other run, it is left out.
    """
    of_a, of_b = _of_kind(pair.a, kind), _of_kind(pair.b, kind)
    if not of_a or not of_b:
        return ()
    floors = [min(w.ns for w in of.values()) if len(of) >= MOST_WORK else 0.0 for of in (of_a, of_b)]

    def part(w: Work | None, floor: float) -> Part:
        # The noise of a single step, or in older results, is not known.
        return (floor, 0.0) if w is None else (w.ns, w.noise_ns or None)

    rows = []
    for name in dict.fromkeys((*of_a, *of_b)):
        one, other = of_a.get(name), of_b.get(name)
        (a_ns, a_noise), (b_ns, b_noise) = part(one, floors[0]), part(other, floors[1])
        if (one or a_ns < b_ns) and (other or b_ns < a_ns):
            time = pair.difference(name, a_ns, b_ns, a_noise, b_noise)
            rows.append(WorkDifference(time, one.calls if one else None, other.calls if other else None))
    return tuple(sorted(rows, key=lambda r: -abs(r.time.ns or 0.0)))


def _exchanges(pair: _Pair) -> tuple[WorkDifference, ...]:
    """Return the collectives by kind, ranks and size; their noise is not known, unless nothing differs."""
    of_a, of_b = ({(e.collective, e.ranks, e.size): e for e in r.exchanges} for r in (pair.a, pair.b))
    if not of_a or not of_b:
        return ()
    rows = []
    for key in dict.fromkeys((*of_a, *of_b)):
        one, other = of_a.get(key), of_b.get(key)
        name = f"{key[0] or 'unknown'} · {key[1]} ranks · {key[2]}"
        time = pair.difference(name, one.transfer_ns if one else 0.0, other.transfer_ns if other else 0.0)
        waits = [e.wait_ns if e else 0.0 for e in (one, other)]
        wait = None if None in waits else pair.difference(f"{name}, waiting", *waits)
        rows.append(WorkDifference(time, one.count if one else None, other.count if other else None, wait))
    return tuple(sorted(rows, key=lambda r: -abs(r.time.ns or 0.0) - abs((r.wait.ns or 0.0) if r.wait else 0.0)))


def _findings(pair: _Pair) -> tuple[FindingChange, ...]:
    """Return what became of each bottleneck that was found in either run, the largest saving first.

    One that is below the threshold in one run only is not gone for that: the figures of both are compared.
    """
    of_a, of_b = ({o.id: o for o in r.outcomes} for r in (pair.a, pair.b))
    changes = []
    for name in dict.fromkeys(o.id for r in (pair.a, pair.b) for o in r.found):
        one, other = of_a.get(name), of_b.get(name)
        in_a = one is not None and one.state == "found"
        known, missing = (one, other) if in_a else (other, one)
        assert known is not None
        state: State = "unknown"
        why = ""
        if one is not None and other is not None and {one.state, other.state} <= {"found", *_WITHOUT}:
            state = _became(one, other, pair.least_ns)
            clear = next((o for o in (one, other) if o.state in _WITHOUT), None)
            if clear is not None and (clear.summary or clear.why):
                why = f"{'A' if clear is one else 'B'}: {clear.summary or clear.why}"
        else:
            where = "B" if in_a else "A"
            why = f"{where}: {missing.why}" if missing else f"{where} is from a dlprof without this rule"
        changes.append(FindingChange(name, state, known.title, _saving(one), _saving(other), why))
    return tuple(sorted(changes, key=lambda f: -max(f.a_ns or 0.0, f.b_ns or 0.0)))


def _became(one: Outcome, other: Outcome, least_ns: float) -> State:
    """Return what became of a bottleneck that was judged in both runs: `one` is A's, `other` B's."""
    if {one.scope, other.scope}.intersection(TIMELESS):  # it has no saving: it is there or not
        return "same" if one.state == other.state else "gone" if one.state == "found" else "new"
    change = other.saving_ns - one.saving_ns
    if abs(change) < max(LEAST_NOISE * math.hypot(one.noise_ns, other.noise_ns), least_ns):
        return "same"
    smaller = min(one, other, key=lambda o: o.saving_ns)
    none = smaller.state in _WITHOUT and smaller.share < LEAST_SHARE
    if change < 0:
        return "gone" if none else "less"
    return "new" if none else "more"


def _saving(outcome: Outcome | None) -> float | None:
    """Return what an outcome saves; None where it is not known, as for clear ones in a result of format 1."""
    known = outcome is not None and (outcome.state == "found" or bool(outcome.by_rank))
    return outcome.saving_ns if outcome is not None and known else None


# Steps do the same work if their samples differ by no more than this: the last batch of an epoch is smaller.
_SAME_WORK = 0.01


class Rates(Struct, frozen=True):
    """What both runs train on: so many samples (`unit`; or tokens) a second and a step.

    `of`: the whole job, or each rank. `noise`: standard error of b ÷ a; None: not known.
    """

    unit: str
    of: str
    a_per_s: float
    b_per_s: float
    a_per_step: float
    b_per_step: float
    noise: float | None = None

    @property
    def ratio(self) -> float:
        """How many times as much as A B trains on in a second."""
        return self.b_per_s / self.a_per_s

    @property
    def same_work(self) -> bool:
        """Whether a step of both runs is of as many samples."""
        return abs(self.b_per_step / self.a_per_step - 1) <= _SAME_WORK

    @property
    def verdict(self) -> Verdict:
        """Whether B is faster or slower; unknown where the noise is."""
        change = abs(self.ratio - 1)
        if change < max(LEAST_SHARE, LEAST_NOISE * (self.noise or 0.0)):
            return "noise"
        if self.noise is None:
            return "unknown"
        return "faster" if self.ratio > 1 else "slower"


def rates(a: Result, b: Result) -> Rates | None:
    """Return the rates of two runs; None where they are not known, or count different things.

    If both count tokens, and their samples differ in length, the rates are of tokens.
    """
    if a.window is None or b.window is None:
        return None
    one, other = a.window.throughput, b.window.throughput
    if one is None or other is None or one.of != other.of:
        return None
    if one.of == "rank" and a.run.world_size != b.run.world_size:
        return None
    shares = [r.window.noise_ns / r.window.step_ns for r in (a, b) if r.window and r.window.noise_ns is not None]
    noise = math.hypot(*shares) if len(shares) == 2 else None
    samples = _rates_in("samples", one, other, noise)
    tokens = _rates_in("tokens", one, other, noise)
    if samples is None or tokens is None:
        return samples or tokens
    as_long = (tokens.b_per_step / samples.b_per_step) / (tokens.a_per_step / samples.a_per_step)
    return samples if abs(as_long - 1) <= _SAME_WORK else tokens


def _rates_in(unit: str, a: Throughput, b: Throughput, noise: float | None) -> Rates | None:
    a_s, b_s, a_step, b_step = (getattr(t, f"{unit}_per_{of}") for of in ("s", "step") for t in (a, b))
    if not (a_s and b_s and a_step and b_step):
        return None
    return Rates(unit, a.of, a_s, b_s, a_step, b_step, None if noise is None else noise * b_s / a_s)
