"""The sentences of a report: the verdict and its gain, who waits for whom, and how far to trust the figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dlprof.plain import NBSP, plain
from dlprof.report.formatting import all_traced, counted, duration, mean_shares, percent, ranks, saves, times, unit
from dlprof.report.looks import look
from dlprof.result import Outcome, Result

# What makes a rank late that others wait for: "for rank 1, which ...".
LATE: Mapping[str, str] = {
    "computation": "computes longer",
    "communication": "is held up in other collectives",
    "copy": "copies longer",
    "input_wait": "waits for its loader",
    "pipeline_bubble": "waits for another stage of its pipeline",
    "checkpoint": "saves a checkpoint",
    "validation": "validates",
    "garbage_collection": "collects Python's garbage",
    "compilation": "compiles",
    "optimizer_host": "spends longer in its optimizer, on the host",
    "host": "spends longer on the host, launching and in Python",
    "launch_latency": "takes longer from one kernel to the next",
    "queued_wait": "has queued work that waits on its device",
    "other": "comes late for a reason that the trace does not tell",
}
ALIKE = 0.1  # of a saving: a setting whose step was predicted this near to it is its remedy


class Headline(NamedTuple):
    """The diagnosis as one sentence, one more on its gain, and the share that the first one is about; "" without."""

    diagnosis: str
    gain: str
    share: str


def headline(result: Result) -> Headline:
    """Return the diagnosis, and what is gained by it, or how far to trust "nothing".

    A finding is never told before a larger part of the step that no rule could judge.
    """
    unjudged = _unjudged(result)
    if result.found:
        found = result.found[0]
        diagnosis, gain = _diagnosis(result, found)
        if unjudged and unjudged.share > found.share:
            beside = f"Beside that: {diagnosis[0].lower()}{diagnosis[1:]} {gain}"
            return Headline(unjudged.sentence, beside, percent(unjudged.share))
        computing = mean_shares(result.time).get("computation", 0.0)
        if computing >= _ALL_BUT and found.share < computing:
            both = f"Computation takes {percent(computing)} of {_each(result)}. {diagnosis}"
            return Headline(both, gain, percent(computing))
        return Headline(diagnosis, gain, percent(found.share if found.lost_share is None else found.lost_share))
    tally = {state: sum(o.state == state for o in result.outcomes) for state in ("clear", "not_measured", "error")}
    unknown = tally["not_measured"] + tally["error"]
    share = ""
    if unjudged and unjudged.share >= max(mean_shares(result.time).values()):
        first, share = unjudged.sentence, percent(unjudged.share)
    elif result.time:
        largest, share = _largest(result)
        first = f"{largest} {unjudged.sentence}" if unjudged else largest
    elif result.window is None:
        first = "No steady step was recorded."
    else:
        first = f"{_each(result).capitalize()} lasts {duration(result.window.step_ns)}; where it goes was not measured."
    if not tally["clear"]:
        return Headline(first, "No rule could be checked on this run, so nothing is said of its bottlenecks.", share)
    second = f"{counted(tally['clear'], 'rule')} found nothing above the threshold"
    return Headline(first, second + (f"; {unknown} could not be measured." if unknown else "."), share)


# Which rules speak of a part of the step; nobody of `other`.
_SPEAKS: Mapping[str, tuple[str, ...]] = {
    "communication": ("exposed_communication", "straggler"),
    "copy": ("exposed_copy", "pageable_copy"),
    "host": ("host_bound",),
    "input_wait": ("input_wait",),
    "launch_latency": ("host_bound", "small_kernels"),
    "optimizer_host": ("host_bound", "unfused_optimizer"),
    "pipeline_bubble": ("pipeline_bubble",),
    "queued_wait": ("queued_wait",),
    "other": (),
}

_IS: Mapping[str, str] = {
    "communication": "is communication that nothing hides",
    "copy": "is copying that nothing hides",
    "host": "waits for the host",
    "input_wait": "waits for data",
    "launch_latency": "passes between queued kernels",
    "optimizer_host": "waits for the optimizer's Python",
    "pipeline_bubble": "is a bubble of the pipeline",
    "queued_wait": "the device idles with work queued",
    "other": "is nothing that was told apart",
}

# A part of the step that no rule could judge is told from here on.
_NOTABLE = 0.05

# Who computes in so much of each step has nothing else to lose.
_ALL_BUT = 0.9


@dataclass(frozen=True)
class _Unjudged:
    """The largest part of the step that no rule could judge: its share, and what is said of it."""

    share: float
    sentence: str


def _unjudged(result: Result) -> _Unjudged | None:
    """Find the largest part of the step, beside computation, that no rule could judge; None where all could be."""
    states = {o.id: o for o in result.outcomes}
    for category, share in mean_shares(result.time).items():
        if share < _NOTABLE:
            return None
        if category not in _SPEAKS:
            continue
        spoke = [states[rule] for rule in _SPEAKS[category] if rule in states]
        if any(o.state in ("found", "clear") for o in spoke):
            continue
        why = next((o.why for o in spoke if o.why), "")
        told = f": {plain(why, 300).rstrip('.')}." if why else ", and no more is known of it."
        return _Unjudged(share, f"{percent(share)} of {_each(result)} {_IS[category]}{told}")
    return None


def _largest(result: Result) -> tuple[str, str]:
    """Name the largest part of the step that is told apart, and how much is not, where that is more; and its share."""
    shares = mean_shares(result.time)
    untold = shares.pop("other", 0.0)
    category, share = next(iter(shares.items()), ("other", untold))
    more = f"; {percent(untold)} is nothing that was told apart" if shares and untold > share else ""
    takes = "take" if category == "copy" else "takes"
    return f"{look(category).name} {takes} {percent(share)} of {_each(result)}{more}.", percent(share)


def _each(result: Result) -> str:
    return "the trace" if unit(result) == "trace" else "each step"


def _diagnosis(result: Result, first: Outcome) -> tuple[str, str]:
    sentence = plain(first.verdict or first.title, 600).strip()
    if not first.verdict and first.share > 0:
        sentence = f"{sentence.rstrip('.')}: {percent(first.share)} of {_each(result)}"
    sentence = sentence if sentence.endswith((".", "!", "?", "…")) else sentence + "."
    if not saves(first):
        return sentence, (
            "Fixing it saves no time, but the job." if first.scope == "risk" else "No saving of time is claimed for it."
        )
    what = "what was traced" if unit(result) == "trace" else "the traced steps" if all_traced(result) else "this job"
    if first.speedup >= 1.005 and math.isfinite(first.speedup):
        return sentence, f"{_remedy(result, first)} would make {what} {times(first.speedup)} faster."
    return sentence, f"Fixing it would save {duration(first.saving_ns)} of {_each(result)}."


def _remedy(result: Result, first: Outcome) -> str:
    """Name the setting that a finding advises, where that is what its saving was predicted for."""
    step = result.window.step_ns if result.window else 0.0
    for forecast in first.forecasts:
        setting = f"{forecast.setting}={forecast.value}"
        advised = first.changes and any(
            (s.name, str(s.to)) == (forecast.setting, forecast.value) for s in first.changes[0].settings
        )
        if advised and abs(step - forecast.step_ns - first.saving_ns) <= ALIKE * first.saving_ns:
            return plain(setting, 60)
    return "Fixing it"


def notices(result: Result) -> list[str]:
    """Return what a reader must know before trusting the figures: how the run ended, and its warnings."""
    said = []
    code, signal = result.run.exit.get("code"), result.run.exit.get("signal")
    if signal:
        said.append(f"The command was ended by signal {signal}; figures cover what it had recorded by then.")
    elif code:
        said.append(f"The command ended with exit code {code}; figures cover what it had recorded by then.")
    return said + [plain(warning, 600) for warning in result.run.warnings]


# Below this share of a step a wait is not worth a sentence; so many sentences are.
WORTH_SAYING = 0.02
MOST_SENTENCES = 3


def waits_for(result: Result) -> dict[int, dict[int, float]]:
    """Return how long each rank waits for which other, ns of the mean step: rank → culprit → ns, the most first."""
    found: dict[int, dict[int, float]] = {}
    for b in result.blame:
        mine = found.setdefault(b.rank, {})
        mine[b.culprit] = mine.get(b.culprit, 0.0) + b.ns
    return {rank: dict(sorted(mine.items(), key=lambda item: -item[1])) for rank, mine in found.items()}


def blamed(result: Result) -> list[str]:
    """Say who waits for whom and why, as "Ranks 0, 2 wait 41 ms a step for rank 1, which waits for its loader."."""
    if result.window is None:
        return []
    least = WORTH_SAYING * result.window.step_ns
    waiting: dict[int, dict[int, float]] = {}
    for rank, mine in waits_for(result).items():
        for culprit, ns in mine.items():
            if culprit >= 0 and ns >= least:
                waiting.setdefault(culprit, {})[rank] = ns
    said = []
    for culprit, by in sorted(waiting.items(), key=lambda item: -sum(item[1].values()))[:MOST_SENTENCES]:
        why: dict[str, float] = {}
        for b in result.blame:
            if b.culprit == culprit and b.rank in by:
                why[b.category] = why.get(b.category, 0.0) + b.ns
        reason = max(why, key=lambda c: why[c])
        mostly = "mostly " if why[reason] < 0.75 * sum(why.values()) else ""
        who = ranks(by)
        mean = duration(sum(by.values()) / len(by))
        said.append(
            f"{who[0].upper()}{who[1:]} {'waits' if len(by) == 1 else 'wait'} {mean} a {unit(result)} for rank"
            f"{NBSP}{culprit}, which {mostly}{LATE.get(reason, plain(reason, 40))}."
        )
    return said
