"""What every renderer says in the same way: names and colours of categories, figures with their units, the headline.

A number and its unit are joined by a no-break space, so that a page never parts them; a terminal turns it into a space.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from dlprof import units
from dlprof.plain import NBSP, plain
from dlprof.result import CATEGORIES, Outcome, Result, TimePart
from dlprof.units import MINUS, UNKNOWN, digits

_QUALIFIED = re.compile(r"^void |(?:[A-Za-z_]\w*|\(anonymous namespace\))::")


@dataclass(frozen=True)
class Category:
    """How a part of a step is named, explained and drawn: on paper and white, on black, in 256 colours, as a glyph."""

    name: str
    meaning: str
    light: str
    dark: str
    ansi: int
    glyph: str


# Paul Tol's bright scheme carries the seven commonest parts. The other seven were chosen so that each stays apart from
# all others under simulated protanopia, deuteranopia and tritanopia.
LOOKS: Mapping[str, Category] = {
    "computation": Category("Computation", "the device computes", "#4477aa", "#4477aa", 67, "█"),
    "communication": Category(
        "Communication", "a collective with no computation beside it", "#ee6677", "#ee6677", 204, "░"
    ),
    "copy": Category(
        "Copies", "a copy with neither computation nor communication beside it", "#ccbb44", "#ccbb44", 185, "▞"
    ),
    "input_wait": Category(
        "Input wait", "the training thread waits for the next batch", "#aa3377", "#c2509a", 132, "▓"
    ),
    "pipeline_bubble": Category(
        "Pipeline bubble", "a pipeline stage has no micro-batch to work on", "#66ccee", "#66ccee", 81, "·"
    ),
    "checkpoint": Category("Checkpoint", "saving holds up training", "#228833", "#228833", 34, "▄"),
    "validation": Category("Validation", "evaluation between training steps", "#332288", "#7b70e8", 62, "▀"),
    "garbage_collection": Category("Garbage collection", "Python collects garbage", "#ee8866", "#ee8866", 209, "×"),
    "compilation": Category("Compilation", "torch.compile compiles", "#661100", "#a0522d", 88, "+"),
    "optimizer_host": Category(
        "Optimizer on the host", "the optimizer's Python, while the device has nothing", "#997700", "#997700", 136, "="
    ),
    "host": Category("Host", "launching and Python, while the device has nothing", "#bbbbbb", "#a7acb5", 250, "▒"),
    "launch_latency": Category(
        "Launch latency",
        "the device has work queued, and its next kernel is about to start",
        "#a8d8a8",
        "#b8e0b8",
        151,
        ":",
    ),
    "queued_wait": Category(
        "Queued work waits", "the device has work queued that waits for something", "#a848f0", "#b050ff", 135, "%"
    ),
    "other": Category("Other", "none of these", "#e2e2e2", "#656b76", 242, "-"),
}

# What a pipeline's stage does, in its timeline.
PASSES: Mapping[str, Category] = {
    "forward": Category("Forward", "a micro-batch's forward pass through the stage", "#4477aa", "#4477aa", 67, "█"),
    "backward": Category("Backward", "its backward pass", "#228833", "#228833", 34, "▓"),
    "input": Category("Backward, inputs", "gradients of the inputs alone", "#66aa55", "#66aa55", 71, "▒"),
    "weight": Category("Backward, weights", "gradients of the weights alone", "#ccbb44", "#ccbb44", 185, "░"),
    "loss": Category("Loss", "the loss of a micro-batch", "#aa3377", "#c2509a", 132, "▄"),
    "reduce": Category("Reduce", "gradients summed over data-parallel ranks", "#ee6677", "#ee6677", 204, "×"),
}

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

# Whose a Python function is.
FRAMES: Mapping[str, Category] = {
    "own": Category("Yours", "a function of the job's own files", "#b5651d", "#e39a57", 137, "█"),
    "library": Category("Libraries", "one of Python or an installed package", "#cfcac0", "#9a9488", 248, "░"),
}

# What is drawn beside the parts of a step: loader workers, the waiting in communication, marks of steps over the run.
BESIDE: Mapping[str, Category] = {
    "worker": Category("Loader worker", "a worker of the loader makes a batch", "#8d7aa8", "#b8a5d6", 139, "▒"),
    "waiting": Category(
        "Waiting for other ranks", "of the communication, until the last rank has come", "#f7b9c1", "#d99aa3", 217, "░"
    ),
    "epoch": Category("Epoch", "an epoch begins or ends", "#7d8597", "#8f98aa", 242, "|"),
    "suspended": Category("Suspended", "the job was stopped until then", "#8a4b3c", "#b06a58", 95, "!"),
}

DRAWN: Mapping[str, Category] = {**LOOKS, **PASSES, **FRAMES, **BESIDE}


def look(category: str) -> Category:
    """Return how a category is drawn; a word that is none is drawn like "other" under its own name."""
    known = DRAWN.get(category)
    if known is not None:
        return known
    other = LOOKS["other"]
    return Category(plain(category, 40) or other.name, other.meaning, other.light, other.dark, other.ansi, other.glyph)


def duration(ns: float) -> str:
    """Write nanoseconds in the unit that suits them: "214.6 ms", "18.3 µs"."""
    return quantity(ns, "ns")


def quantity(value: float, unit: str) -> str:
    """Write a value of a unit; "ns", "bytes" and "share" take the multiple that suits them."""
    return units.quantity(value, unit).replace(" ", NBSP)


def percent(share: float) -> str:
    """Write a share of one as "31 %"; small ones keep a digit."""
    return units.percent(share).replace(" ", NBSP)


def about(share: float) -> str:
    """Write a share in whole percent, for where many stand side by side."""
    return percent(share) if not math.isfinite(share) or abs(share) < 0.00995 else f"{100 * share:.0f}{NBSP}%"


def unqualified(kernel: str) -> str:
    """Leave out a C++ kernel's return type and namespaces, which are alike for most, where there is little room."""
    head, template, rest = kernel.partition("<")
    return _QUALIFIED.sub("", head) + template + rest


def times(factor: float) -> str:
    """Write a factor as "1.44 ×"; from ten on nobody would take it at its word, and it is "over 10 ×"."""
    if not math.isfinite(factor):
        return UNKNOWN
    if factor > 10:
        return f"over 10{NBSP}×"
    return f"{factor:.2f}{NBSP}×"


def saves(outcome: Outcome) -> bool:
    """Say whether a finding claims a saving; one of infinity or of no number is none."""
    return outcome.saving_ns > 0 and math.isfinite(outcome.saving_ns)


def saving(outcome: Outcome) -> str:
    """Write what a finding saves of a step, as "−66.0 ms"; a finding that claims no saving has a dash."""
    if outcome.scope == "risk":
        return "risk"
    return MINUS + duration(outcome.saving_ns) if saves(outcome) else UNKNOWN


def noise(outcome: Outcome) -> str:
    """Write twice the standard error of what a saving was estimated from, as "± 3.10 ms"; "" where it is not known."""
    known = saves(outcome) and math.isfinite(outcome.noise_ns) and outcome.noise_ns > 0
    return f"±{NBSP}{duration(2 * outcome.noise_ns)}" if known else ""


def speedup(outcome: Outcome) -> str:
    """Write how many times faster the step would be, as "1.44 ×"; a dash without a saving."""
    return times(outcome.speedup) if saves(outcome) and outcome.speedup >= 1 else UNKNOWN


def together(result: Result) -> str:
    """Bound what all findings give together, as a sentence; "" where fewer than two claim a saving."""
    most = result.together
    # From a hundred on it bounds nothing.
    if most is None or sum(saves(o) for o in result.found) < 2 or not 0 < most.speedup < 100:
        return ""
    return f"All of these together: at most {times(most.speedup)} faster ({MINUS}{duration(most.saving_ns)})."


def counted(n: int, one: str, many: str = "") -> str:
    """Write a number of things: "1 step", "412 steps"."""
    return f"{n:,}{NBSP}{one if n == 1 else many or one + 's'}"


def ranks(numbers: Iterable[int]) -> str:
    """Write ranks with runs joined: "rank 3", "ranks 0–3, 7"."""
    ordered = sorted(set(numbers))
    spans: list[list[int]] = []
    for n in ordered:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in spans]
    shown = parts if len(parts) <= 12 else [*parts[:10], f"… {len(ordered)} in all"]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(shown)}" if ordered else ""


def unit(result: Result) -> str:
    """Return the word for what the figures divide: "step", or "trace" where nothing marked a step."""
    return result.window.unit if result.window else "step"


def name(result: Result) -> str:
    """Name the run by its script: what ends in .py, what stands after -m, else the program or the folder."""
    command = [plain(word) for word in result.run.command]
    chosen = next((word for word in command if word.endswith(".py")), None)
    if chosen is None and "-m" in command[:-1]:
        chosen = command[command.index("-m") + 1]
    if chosen is None:
        chosen = command[0] if command else plain(result.run.path)
    return plain(PurePosixPath(chosen.replace("\\", "/")).name or chosen, 60) or "run"


def devices(result: Result) -> str:
    """Say what ran: "4 × NVIDIA H200", or the number of ranks where the device is not known."""
    size = max(result.run.world_size, len(result.run.ranks))
    return f"{size}{NBSP}× {plain(result.run.device, 80)}" if result.run.device else counted(size, "rank")


def steps(result: Result) -> str:
    """Say which steps were measured, their mean and, where known, MFU: "412 steady steps of 214.6 ms · 23 % MFU"."""
    window = result.window
    if window is None:
        return "no steps recorded"
    if window.unit == "trace":
        return f"a trace of {duration(window.step_ns)} without marked steps"
    used = f" · {percent(window.mfu)} MFU" if window.mfu is not None else ""
    return f"{counted(window.steps, 'steady step')} of {duration(window.step_ns)}{used}"


def all_traced(result: Result) -> bool:
    """Return whether no step is known but those that were traced."""
    return result.window is not None and result.window.source == "trace"


def limits(result: Result) -> str:
    """Say how far the traced steps stand for the job's; "" where nothing was traced."""
    window = result.window
    if window is None or window.unit != "step":
        return ""
    if window.overhead is not None:
        traced = counted(window.traced_steps, "traced step") if window.traced_steps else "the traced steps"
        return f"{traced} took {times(window.overhead)} as long as the others"
    if not all_traced(result):
        return ""
    if window.steps == 1:
        return "the one step was traced: how much that slows it, and how much steps vary, is not known"
    return "every step was traced: how much that slows them is not known"


def by_rank(time: Sequence[TimePart]) -> dict[int, dict[str, TimePart]]:
    """Group the parts of the step by rank, in order of rank."""
    grouped: dict[int, dict[str, TimePart]] = {}
    for part in time:
        grouped.setdefault(part.rank, {})[part.category] = part
    return dict(sorted(grouped.items()))


def ordered(categories: Iterable[str]) -> list[str]:
    """Return each category once: the known ones in the order in which they claim time, then any others."""
    seen = list(dict.fromkeys(categories))
    return [c for c in CATEGORIES if c in seen] + [c for c in seen if c not in CATEGORIES]


# Below this share of a step a wait is not worth a sentence; so many sentences are.
WORTH_SAYING = 0.02
MOST_SENTENCES = 3
ALIKE = 0.1  # of a saving: a setting whose step was predicted this near to it is its remedy


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


def mean_shares(time: Sequence[TimePart]) -> dict[str, float]:
    """Return each category's share of the step, as the mean over ranks, largest first."""
    n = len({part.rank for part in time})
    sums: dict[str, float] = {}
    for part in time:
        sums[part.category] = sums.get(part.category, 0.0) + part.share
    return dict(sorted(((c, s / n) for c, s in sums.items()), key=lambda item: -item[1]))


def outliers(time: Sequence[TimePart], count: int) -> list[int]:
    """Return up to `count` ranks whose step is made up most unlike the mean one's, the farthest first.

    Distance is half the sum of absolute differences of shares: the part of the step spent otherwise than by the mean
    rank. Below 5 % nobody could tell the bars apart, and none is named.
    """
    mean = mean_shares(time)
    away = {
        rank: sum(abs((parts[c].share if c in parts else 0.0) - share) for c, share in mean.items()) / 2
        for rank, parts in by_rank(time).items()
    }
    return sorted((r for r, d in away.items() if d >= 0.05), key=lambda r: -away[r])[:count]


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


def cell(value: Any, column: str = "") -> str:
    """Write a cell of a table; columns named ..._ns, ..._bytes, ..._share or ..._times get their unit."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        unit_of = suffix(column)
        if unit_of == "times":
            return times(float(value))
        return quantity(float(value), unit_of) if unit_of else digits(value)
    return plain(value, 200)


def suffix(column: str) -> str:
    """Return the unit that a column's name ends in, of those that are written in multiples; "" where it has none."""
    return next(
        (u for u in ("ns", "bytes", "share", "times") if column.endswith(f"_{u}") or column == u == "share"), ""
    )


def header(column: str) -> str:
    """Write a column's name as a heading, without the unit that its cells carry."""
    u = suffix(column)
    bare = column[: -len(u) - 1] if u in ("ns", "bytes", "times") else column
    return plain(bare.replace("_", " ") if u else bare, 60)
