"""The sentences of a report: the verdict and its gain, which ranks wait for which, and warnings.

Also of what has no steps, a profile of another tool alone or a log of GPUs, and of how far a device's work is from what
the device can do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from dlprof.plain import NBSP, plain
from dlprof.report.formatting import (
    all_traced,
    counted,
    duration,
    gained,
    mean_shares,
    percent,
    quantity,
    ranks,
    saves,
    times,
    unit,
)
from dlprof.report.looks import look
from dlprof.result import ForeignLoad, MemoryPeak, Outcome, Result, RunPart
from dlprof.result.figures import GpuLog, Profile
from dlprof.units import short, used_by_others

# What makes a rank late: "for rank 1, which ...".
_LATE: Mapping[str, str] = {
    "computation": "computes longer",
    "communication": "is held up in other collectives",
    "copy": "copies longer",
    "input_wait": "waits for its loader",
    "pipeline_bubble": "waits for another stage of its pipeline",
    "checkpoint": "saves a checkpoint",
    "validation": "validates",
    "garbage_collection": "collects garbage in Python",
    "compilation": "compiles",
    "periodic_work": "does something between its steps every n-th time",
    "optimizer_host": "spends longer in its optimizer, on the host",
    "host": "spends longer on the host, in launches and Python",
    "launch_latency": "takes longer from one kernel to the next",
    "queued_wait": "has queued work that waits on its device",
    "other": "is late for a reason that the trace does not show",
}

# A setting is a finding's remedy if its predicted step is this near to the finding's, as a share of the saving.
ALIKE = 0.1

# The smallest part of the step that is reported where no rule could judge it.
_NOTABLE = 0.05

# Tracing that makes steps so many times as long is told.
SLOWED = 1.02

# With this share of computation there is little else to lose.
_ALL_BUT = 0.9

# The gain of fixing what costs no time.
_WITHOUT_TIME = {
    "risk": "Fixing it saves no time, but may save the job.",
    "failure": "The job cannot continue until this is fixed.",
}

# The heading of what is saved only where the job trains otherwise.
APART = "If the training may change"
OTHERWISE = " (changes the training)"

# Shorter waits, as a share of the step, get no sentence; and the most sentences.
WORTH_SAYING = 0.02
MOST_SENTENCES = 3

# What a part of the step is, "12 % of each step ...", and the rules that judge it.
_PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "communication": ("is exposed communication", ("exposed_communication", "straggler")),
    "copy": ("is exposed copies", ("exposed_copy", "pageable_copy")),
    "host": ("waits for the host", ("host_bound",)),
    "input_wait": ("waits for data", ("input_wait",)),
    "launch_latency": ("passes between queued kernels", ("host_bound",)),
    "optimizer_host": ("waits for the optimizer's Python code", ("host_bound", "unfused_optimizer")),
    "pipeline_bubble": ("is pipeline bubble", ("pipeline_bubble",)),
    "queued_wait": ("is device idle time with work queued", ("queued_wait",)),
    "other": ("is not attributed to any category", ()),
}

# Rules whose finding says where such a part comes from, though its own rule could not judge it.
_EXPLAIN: Mapping[str, tuple[str, ...]] = {"host": ("busy_thread", "step_python", "parameter_loop")}


class Headline(NamedTuple):
    """The diagnosis as one sentence, one more on its gain, and the share that the first one is about; "" without."""

    diagnosis: str
    gain: str
    share: str


def headline(result: Result) -> Headline:
    """Return the diagnosis and its gain, or how far "nothing found" can be trusted.

    A part of the step that no rule could judge comes before any smaller finding.
    """
    unjudged = _unjudged(result)
    if result.found and result.found[0].scope == "failure":
        return Headline(*_diagnosis(result, result.found[0]), "")
    if result.found:
        found = result.found[0]
        diagnosis, gain = _diagnosis(result, found)
        if unjudged and unjudged.share > found.share:
            also = f"In addition, {diagnosis[0].lower()}{diagnosis[1:]} {gain}"
            return Headline(unjudged.sentence, also, percent(unjudged.share))
        computing = mean_shares(result.time).get("computation", 0.0)
        if computing >= _ALL_BUT and found.share < computing:
            both = f"Computation takes {percent(computing)} of {_each(result)}. {diagnosis}"
            return Headline(both, gain, percent(computing))
        return Headline(diagnosis, gain, percent(found.share if found.lost_share is None else found.lost_share))
    if result.window is None and (said := of_logs(result)):
        diagnosis, gain, share = said
        return Headline(diagnosis, " ".join(filter(None, (_held(result.memory), gain))), share)
    states = [o.state for o in result.outcomes]
    clear, unknown = states.count("clear"), states.count("not_measured") + states.count("error")
    apart = states.count("does_not_apply")
    share = ""
    if unjudged and unjudged.share >= max(mean_shares(result.time).values()):
        first, share = unjudged.sentence, percent(unjudged.share)
    elif result.time:
        largest, share = _largest(result)
        first = f"{largest} {unjudged.sentence}" if unjudged else largest
    elif result.window is None:
        first = _held(result.memory) or _clear(result) or "No steady step was recorded."
    else:
        first = f"{_each(result).capitalize()} lasts {duration(result.window.step_ns)}; where it goes was not measured."
    if not clear:
        return Headline(first, "No rule could be checked on this run, so its bottlenecks are not known.", share)
    if result.foreign_load is not None and result.foreign_load.disturbs:
        return Headline(first, disturbed(result.foreign_load), share)
    second = [f"{counted(clear, 'rule')} found nothing above the threshold"]
    second += [f"{unknown} could not be measured"] if unknown else []
    second += [f"{apart} {'does' if apart == 1 else 'do'} not apply"] if apart else []
    said = (f"{'; '.join(second)}.", _heaviest_line(result), device_floor(result)[1])
    return Headline(first, " ".join(filter(None, said)), share)


# A line that computes so much of the step is named where no rule has found anything.
_HEAVY = 0.25


def _heaviest_line(result: Result) -> str:
    """Return the line whose operators take most, where that is much; "" else, or where it only calls the model."""
    top = next((one for one in result.lines if not _CALLS_MODEL.fullmatch(one.source)), None)
    if top is None or top.share < _HEAVY:
        return ""
    text = f"`{short(plain(top.source), 80)}` ({plain(top.file, 120)}:{top.line})"
    return f"{percent(top.share)} of what is computed is called in {text}, with its part of the backward pass."


# Such a line leads to all of the model, and says nothing of it.
_CALLS_MODEL = re.compile(r"(\w+(, \w+)* = |return )?[\w.]*(model|net|self)\w*\(.*\)[\w.]*")


def _held(memory: Sequence[MemoryPeak]) -> str:
    """Return the highest peak of GPU memory among the ranks, and the line with most of it; "" without a snapshot."""
    if not memory:
        return ""
    most = max(memory, key=lambda peak: peak.bytes)
    of = (
        f", {percent(most.site_bytes / most.bytes)} of it by {plain(most.site, 120)}"
        if most.site and most.bytes
        else ""
    )
    held, reserved = (quantity(n, "bytes") for n in (most.bytes, most.reserved_bytes))
    where = f" on rank {most.rank}" if len(memory) > 1 else ""
    if most.whole:
        return f"GPU memory peaked at {held} allocated{where}{of}; {reserved} were reserved."
    return f"When the snapshot was taken, {held} of GPU memory were allocated{where}{of}; {reserved} were reserved."


def _clear(result: Result) -> str:
    """Return the summary of the first rule without a finding, for a run without steps; "" where none has one."""
    said = next((plain(o.summary, 300) for o in result.outcomes if o.state == "clear" and o.summary), "")
    return f"{said[:1].upper()}{said[1:]}." if said else ""


def disturbed(load: ForeignLoad) -> str:
    """Say that a run beside other programs on the cores cannot rule out bottlenecks."""
    said = used_by_others(load.foreign, load.cores, load.waited)
    return f"{said[0].upper()}{said[1:]}: this run cannot rule out bottlenecks. Record it on an idle host."


class _Unjudged(Struct, frozen=True):
    """The largest part of the step that no rule could judge: its share, and a sentence on it."""

    share: float
    sentence: str


def _unjudged(result: Result) -> _Unjudged | None:
    """Return the largest part of the step that no rule could judge; None where there is none of _NOTABLE."""
    states = {o.id: o for o in result.outcomes}
    for category, share in mean_shares(result.time).items():
        if share < _NOTABLE:
            return None
        if category not in _PARTS:
            continue
        what, rules = _PARTS[category]
        judges = [states[rule] for rule in rules if rule in states]
        explained = any(states[rule].state == "found" for rule in _EXPLAIN.get(category, ()) if rule in states)
        if not explained and not any(o.state in ("found", "clear") for o in judges):
            unknown = ", and no rule could judge it" if rules else ""
            why = next((f": {plain(o.why, 300).rstrip('.')}" for o in judges if o.why), unknown)
            return _Unjudged(share, f"{percent(share)} of {_each(result)} {what}{why}.")
    return None


def _largest(result: Result) -> tuple[str, str]:
    """Return a sentence on the largest category of the step, with the unattributed time if larger; and its share."""
    shares = mean_shares(result.time)
    other = shares.pop("other", 0.0)
    category, share = next(iter(shares.items()), ("other", other))
    more = f"; {percent(other)} is not attributed to any category" if shares and other > share else ""
    takes = "take" if category == "copy" else "takes"
    judges = (o for o in result.outcomes if o.id in _PARTS.get(category, ("", ()))[1] and o.state == "clear")
    why_not = (plain(o.summary, 400) for o in judges if o.summary and (o.lost_share or 0.0) >= _NOTABLE)
    why = next((f" {text[:1].upper()}{text[1:]}." for text in why_not), "")
    return f"{look(category).name} {takes} {percent(share)} of {_each(result)}{more}.{why}", percent(share)


def _each(result: Result) -> str:
    return "the trace" if unit(result) == "trace" else "each step"


def _diagnosis(result: Result, first: Outcome) -> tuple[str, str]:
    sentence = plain(first.verdict or first.title, 600).strip()
    if not first.verdict and first.share > 0:
        sentence = f"{sentence.rstrip('.')}: {percent(first.share)} of {_each(result)}"
    sentence = sentence if sentence.endswith((".", "!", "?", "…")) else sentence + "."
    if not saves(first):
        return sentence, _WITHOUT_TIME.get(first.scope, "It has no estimated saving.")
    if first.changes and first.changes[0].informs:
        return sentence, "No change is known to dlprof that would gain some of it."
    what = "what was traced" if unit(result) == "trace" else "the traced steps" if all_traced(result) else "this job"
    if first.speedup >= 1.005 and math.isfinite(first.speedup):
        return sentence, f"{_remedy(result, first)}{_at(first)} would make {what} {gained(first)}."
    most = "at most " if first.at_most else ""
    return sentence, f"Fixing it would save {most}{duration(first.saving_ns)} of {_each(result)}."


def _remedy(result: Result, first: Outcome) -> str:
    """Return the setting that a finding advises first, if its saving was predicted for that; else "Fixing it"."""
    step = result.window.step_ns if result.window else 0.0
    advised = {(s.name, str(s.to)) for change in first.changes[:1] for s in change.settings}
    for forecast in first.forecasts:
        alike = abs(step - forecast.step_ns - first.saving_ns) <= ALIKE * first.saving_ns
        if alike and (forecast.setting, forecast.value) in advised:
            return plain(f"{forecast.setting}={forecast.value}", 60)
    return "Fixing it"


def _at(first: Outcome) -> str:
    """Return where a finding's first change belongs, " at train.py:17"; "" where no line of the script is known."""
    places = [*(change.at for change in first.changes[:1] if change.at), *first.where[:1]]
    place = next((p for p in places if p.line), None)
    return f" at {plain(f'{place.file}:{place.line}', 120)}" if place else ""


# What a part of the host's time is called.
_HOST_PARTS: Mapping[str, str] = {
    "loop": "a loop over parameters or samples",
    "waits": "waits for the device",
    "optimizer": "the optimizer",
    "between": "Python between the phases",
    "launches": "launches of kernels",
}


def host_limited(result: Result) -> str:
    """Say what waiting for the host costs the device, in all and by part; "" where that is little or has one part."""
    found, step = result.host_limited, result.window.step_ns if result.window else 0.0
    if found is None or found.gain_ns < _NOTABLE * step:
        return ""
    gains: dict[str, float] = {}
    for part in found.parts:
        gains[part.part] = gains.get(part.part, 0.0) + part.gain_ns
    notable = [(name, ns) for name, ns in gains.items() if ns >= WORTH_SAYING * step]
    if len(notable) < 2:
        return ""
    each = ", ".join(f"{_HOST_PARTS[name]} {duration(ns)}" for name, ns in notable)
    return (
        f"The device waits for its host. Without that, {_each(result)} would take"
        f" {duration(max(step - found.gain_ns, 0.0))} instead of {duration(step)}. Each part alone costs: {each}."
    )


# What a part of the run is, before "12 %"; and how many are said: the largest.
_RUN_PARTS = {
    "launch": "starting Python and importing",
    "setup": "setting up",
    "first_batch": "waiting for the first batch",
    "warmup": "warming up",
    "steady": "steady steps",
    "traced": "steps that recording made longer",
    "epoch_ends": "first and last steps of epochs",
    "validation": "validation",
    "other": "steps that neither train nor validate",
    "stalled": "standing still",
    "suspended": "standing still, suspended",
    "end": "what follows the last step",
}
_MOST_PARTS = 4
# A rank is named for a part that takes it so many times as long as the mean.
_APART = 1.5


def budget(result: Result) -> str:
    """Say where the time of the whole run went; "" where that is not known, or all steady steps."""
    total = sum(part.ns for part in result.budget)
    notable = [part for part in result.budget if part.share >= _NOTABLE]
    if len(notable) < 2:
        return ""
    largest = sorted(notable, key=lambda part: -part.share)[:_MOST_PARTS]
    each = ", ".join(f"{_RUN_PARTS.get(part.part, part.part)} {percent(part.share)}{_apart(part)}" for part in largest)
    return f"The run took {duration(total)}: {each}."


def _apart(part: RunPart) -> str:
    """Name the rank on which a part of the run took much longer than on the others."""
    if part.most_rank < 0 or part.most_ns < _APART * part.ns:
        return ""
    return f" ({duration(part.most_ns)} on rank {part.most_rank})"


def notices(result: Result) -> list[str]:
    """Return what a reader must know before trusting the figures: how the run ended, and its warnings."""
    code, signal = result.run.exit.get("code"), result.run.exit.get("signal")
    why = " (SIGTERM: a time limit, a preemption, or somebody)" if signal == 15 else ""
    ended = f"was ended by signal {signal}{why}" if signal else f"ended with exit code {code}" if code else ""
    first = [f"The command {ended}; the figures cover what was recorded until then."] if ended else []
    return first + [plain(warning, 600) for warning in result.run.warnings]


def traced(result: Result) -> str:
    """Say how figures of traced steps differ from savings, which are of all steps; "" without untraced steps."""
    window = result.window
    if window is None or window.overhead is None or window.unit == "trace":
        return ""
    longer = f", which tracing made {times(window.overhead)} as long" if window.overhead >= SLOWED else ""
    return (
        f"Savings are of the mean untraced step, {duration(window.step_ns)}. Times of a traced step are as the profiler"
        f" saw them{longer}. A wait is among them in full, also while the device still works: its cure saves less."
    )


def span(result: Result) -> str:
    """Say why the device's span is longer than the traced steps; "" where it is not."""
    window, longest = result.window, max((d.span_ns for d in result.device), default=0)
    steps = window.traced_steps * window.step_ns * (window.overhead or 1.0) if window and window.unit == "step" else 0.0
    if window is None or not 0 < (1 + _NOTABLE) * steps < longest:
        return ""
    behind = f" (as a step begins, it is {duration(window.lag_ns)} behind its host)" if window.lag_ns else ""
    return (
        f"The span of {duration(longest)} is longer than the {counted(window.traced_steps, 'traced step')},"
        f" {duration(steps)} together: what the device still did of the step before{behind}, or of the next, is in it."
    )


def waits_for(result: Result) -> dict[int, dict[int, float]]:
    """Return how long each rank waits for which other, ns of the mean step: rank → culprit → ns, the most first."""
    found: dict[int, dict[int, float]] = {}
    for b in result.blame:
        mine = found.setdefault(b.rank, {})
        mine[b.culprit] = mine.get(b.culprit, 0.0) + b.ns
    return {rank: dict(sorted(mine.items(), key=lambda item: -item[1])) for rank, mine in found.items()}


class Culprit(Struct, frozen=True):
    """A rank that others wait for, all in ns of the mean step.

    `by`: how long each rank waits for it. `why`: by category, how long it delays them, the mean over those ranks.
    """

    rank: int
    by: Mapping[int, float]
    why: Mapping[str, float]


def culprits(result: Result, least: float) -> list[Culprit]:
    """Return the ranks that others wait for, those that cost all ranks together most first.

    Waits shorter than the share `least` of the step do not count; without steady steps there are none.
    """
    by: dict[int, dict[int, float]] = {}
    for rank, mine in waits_for(result).items():
        for culprit, ns in mine.items():
            if result.window and culprit >= 0 and ns > 0 and ns >= least * result.window.step_ns:
                by.setdefault(culprit, {})[rank] = ns
    why: dict[int, dict[str, float]] = {culprit: {} for culprit in by}
    for b in result.blame:
        if b.rank in by.get(b.culprit, ()) and b.ns > 0:
            of = why[b.culprit]
            of[b.category] = of.get(b.category, 0.0) + b.ns / len(by[b.culprit])
    order = sorted(by, key=lambda culprit: -sum(by[culprit].values()))
    return [Culprit(culprit, by[culprit], why[culprit]) for culprit in order]


def late(category: str) -> str:
    """Say what makes a rank late: "waits for its loader"."""
    return _LATE.get(category, plain(category, 40))


def blamed(result: Result) -> list[str]:
    """Say which ranks wait for which: "Ranks 0, 2 wait 41 ms a step for rank 1, which waits for its loader."."""
    said = []
    for culprit in culprits(result, WORTH_SAYING)[:MOST_SENTENCES]:
        mean = sum(culprit.why.values())
        reason = max(culprit.why, key=lambda category: culprit.why[category])
        mostly = "mostly " if culprit.why[reason] < 0.75 * mean else ""
        said.append(
            f"{ranks(culprit.by).capitalize()} {'waits' if len(culprit.by) == 1 else 'wait'} {duration(mean)} a"
            f" {unit(result)} for rank{NBSP}{culprit.rank}, which {mostly}{late(reason)}."
        )
    return said


# Memory fuller than FULL is reported, unless a GPU is idler than LOW.
FULL, LOW = 0.92, 0.8

_WHY = {
    "heat": "it is too hot",
    "power_brake": "its power supply brakes it",
    "hardware": "its hardware slows it down",
    "set": "its clock was set lower",
    "locked": "it stays far below its maximum",
    "limit": "its power limit was lowered",
}

_STEPS = "Where a step's time goes is not known without steps: record with dlprof wrap, or put a trace beside it."


def of_logs(result: Result) -> tuple[str, str, str] | None:
    """Return the sentence on such a run, one on what it cannot show, and the share in the first; None without logs."""
    said = [sentence for sentence in (_of_profiles(result.profiles), _of_gpus(result.gpu_logs)) if sentence]
    if not said:
        return None
    return " ".join(text for text, _ in said), _STEPS, said[0][1]


def described(result: Result) -> str:
    """Return what was read of a run without steps: "a profile of py-spy, 1,820 samples; 2 GPUs logged over 6.9 min"."""
    parts = [f"{plain(p.name, 60)}, of {plain(p.tool, 40)}: {quantity(p.total, p.unit)}" for p in result.profiles]
    if result.gpu_logs:
        longest = max(log.seconds for log in result.gpu_logs)
        over = f" over {duration(longest * 1e9)}" if longest > 0 else ""
        parts.append(f"{counted(len(result.gpu_logs), 'GPU')} logged{over}")
    return "; ".join(parts)


def _of_profiles(profiles: Sequence[Profile]) -> tuple[str, str] | None:
    """Say where most of the time was seen."""
    found = [p for p in profiles if p.function and 0 < p.share <= 1]
    if not found:
        return None
    top = max(found, key=lambda p: (p.own, p.share))
    file = plain(top.file.replace("\\", "/").rpartition("/")[2], 80)
    where = plain(top.function, 120)
    if not top.file.startswith("<"):
        where += f" ({file}:{top.line})" if top.line else f" ({file})"
    share, whole = percent(top.share), quantity(top.total, top.unit)
    if top.tool == "line_profiler":
        return f"{share} of the {whole} in {plain(top.function, 120)} is in line {top.line} of {file}.", share
    of = f"the {whole} that {plain(top.tool, 40)} {'counted' if top.counted else 'saw'}"
    about = "About " if top.counted else ""
    libraries = ", with what it calls of libraries" if top.own else ""
    return f"{about}{share} of {of} {'are' if top.unit == 'samples' else 'is'} in {where}{libraries}.", share


def _of_gpus(logs: Sequence[GpuLog]) -> tuple[str, str] | None:
    """Say what is worst: a clock that is held down, memory that is nearly full, or how idle the idlest GPU is."""
    if not logs:
        return None
    when = "" if all(log.at == "run" for log in logs) else ", over the whole log"
    slow = max(logs, key=lambda log: log.clock_lost)
    if slow.held_by and slow.clock_lost >= 0.02 and slow.sm_clock_mhz:
        share = percent(slow.clock_lost)
        clock = quantity(slow.sm_clock_mhz, "MHz")
        why = _WHY.get(slow.held_by, plain(slow.held_by, 40))
        return f"{_gpu(slow)} ran at {clock}, {share} below what it could: {why}.", share
    filled = {log.gpu: _filled(log) for log in logs}
    full = max(logs, key=lambda log: filled[log.gpu])
    busy = [log for log in logs if log.busy_share is not None]
    idlest = min(busy, key=lambda log: log.busy_share or 0.0, default=None)
    if filled[full.gpu] > FULL and (idlest is None or (idlest.busy_share or 0.0) >= LOW):
        share = percent(filled[full.gpu])
        return f"{share} of the memory of {_gpu(full)} was taken: a longer batch may end the job.", share
    if idlest is None:
        return _of_power(logs)
    share = percent(idlest.busy_share or 0.0)
    draws = f" and draws {quantity(idlest.power_w, 'W')}" if idlest.power_w is not None else ""
    limit = f" of {quantity(idlest.power_limit_w, 'W')}" if draws and idlest.power_limit_w else ""
    least = f", the least of {counted(len(busy), 'GPU')}" if len(busy) > 1 else ""
    return f"Some kernel runs on {_gpu(idlest)} {share} of the time{least}{draws and ','}{draws}{limit}{when}.", share


def _of_power(logs: Sequence[GpuLog]) -> tuple[str, str] | None:
    known = [log for log in logs if log.power_w is not None]
    if not known:
        return f"{counted(len(logs), 'GPU')} logged, without their use: {plain(logs[0].lacks, 200)} would bring it.", ""
    most = max(known, key=lambda log: log.power_w or 0.0)
    return f"{_gpu(most)} draws {quantity(most.power_w or 0.0, 'W')} on the mean; how busy it is was not logged.", ""


def _filled(log: GpuLog) -> float:
    if not log.memory_total_bytes or log.memory_used_bytes is None:
        return 0.0
    share = log.memory_used_bytes / log.memory_total_bytes
    return share if math.isfinite(share) and share <= 1 else 0.0


def _gpu(log: GpuLog) -> str:
    name = plain(log.gpu, 60)
    return f"GPU {name.partition(' ')[2]}" if " " in name else "the GPU"


# A device limits the step from this share of it on; with more than the step, kernels run beside each other, and their
# floors do not add up. Kinds with less of the time above the floor are not named, nor a floor of fused chains that is
# hardly lower; a larger speed-up is no bound.
_LIMITS, _BESIDE, _NAMED, _FUSED, _VAST = 0.9, 1.05, 0.15, 0.98, 10.0


def device_floor(result: Result) -> tuple[str, str]:
    """Return the floor of a step that the device limits, with the kinds that are farthest above theirs, and how much
    faster it could be by faster kernels alone; "" where it does not limit it, or no floor is known.
    """
    work, window = result.device_work, result.window
    if not work or work.floor_ns is None or not window or window.unit != "step" or not window.step_ns:
        return "", ""
    if not _LIMITS <= work.ns / window.step_ns <= _BESIDE:
        return "", ""
    fused, above_ns = work.fused_floor_ns, work.ns - work.floor_ns
    less = ""
    if fused and fused < _FUSED * work.floor_ns:
        less = f", or {duration(fused)} with chains of elementwise operators fused"
    said = (
        f"As written, the work of this step needs at least {duration(work.floor_ns)} on this GPU{less} (its FLOPs and"
        f" bytes at the data sheet's rates); its kernels take {duration(work.ns)}."
    )
    far = sorted(
        (row for row in work.rows if work.above_ns(row) > _NAMED * above_ns), key=lambda row: -work.above_ns(row)
    )
    named = [f"{'at least ' * bool(row.shared_ns)}{duration(work.above_ns(row))} in {row.kind}" for row in far[:2]]
    if named and above_ns > (1 - _LIMITS) * work.ns:
        said += f" Of the {duration(above_ns)} above that bound, they spend {' and '.join(named)}."
    faster = window.step_ns / max(window.step_ns - above_ns, work.floor_ns)
    most = f"Faster kernels alone could make it at most {times(faster)} faster."
    return said, most if faster <= _VAST else ""
