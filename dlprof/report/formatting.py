"""How figures are written everywhere: durations, shares, factors, savings, cells of tables.

A no-break space joins a number and its unit, so that a page never separates them; the terminal prints a space.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, get_args

from dlprof import units
from dlprof.plain import NBSP, command_line, plain
from dlprof.result import CATEGORIES, TIMELESS, Change, Outcome, Place, Result, State, TimePart
from dlprof.result.figures import Throughput
from dlprof.units import MINUS, UNKNOWN, digits

_NAMESPACES = re.compile(r"(?:\b[A-Za-z_]\w*|\(anonymous namespace\))::(?=[\w(])")


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
    """Write a share in whole percent, where many are next to each other."""
    return percent(share) if not math.isfinite(share) or abs(share) < 0.00995 else f"{100 * share:.0f}{NBSP}%"


def kernels(names: Sequence[str]) -> list[str]:
    """Write C++ kernels without namespaces and parameters: "vectorized_elementwise_kernel<…, CUDAFunctor_add<float>>".

    Of kernels with the same name, only the arguments of the template that differ are shown.
    """
    parted = [_parted(_NAMESPACES.sub("", name.removeprefix("void "))) for name in names]
    written = []
    for head, own in parted:
        alike = [other for other_head, other in parted if other_head == head and other != own]
        differs = [any(other[i : i + 1] != [arg] for other in alike) for i, arg in enumerate(own)]
        kept = [arg if differs[i] else "…" for i, arg in enumerate(own) if differs[i] or not i or differs[i - 1]]
        shown = kept if any(differs) else own
        written.append(f"{head}<{', '.join(shown)}>" if own else head)
    return written


def _parted(kernel: str) -> tuple[str, list[str]]:
    """Return a kernel's name and the arguments of its template."""
    head, opened, rest = kernel.partition("<")
    if not (head and opened) or "(" in head:
        return kernel.partition("(")[0] or kernel, []
    arguments, depth = [""], 0
    for char in rest:
        if not depth and char == ">":
            break
        depth += (char in "<({[") - (char in ">)}]" and not arguments[-1].endswith("-"))
        if char == "," and not depth:
            arguments.append("")
        else:
            arguments[-1] += char
    return head, [" ".join(argument.split()) for argument in arguments if argument]


def times(factor: float) -> str:
    """Write a factor as "1.44 ×", or "over 10 ×", as estimates so large are not exact."""
    if not math.isfinite(factor):
        return UNKNOWN
    return f"over 10{NBSP}×" if factor > 10 else f"{factor:.2f}{NBSP}×"


def saves(outcome: Outcome) -> bool:
    """Return whether a finding has a finite saving."""
    return outcome.saving_ns > 0 and math.isfinite(outcome.saving_ns)


def saving(outcome: Outcome) -> str:
    """Write what a finding saves of a step, as "−66.0 ms", of the run as "−41 %"; a dash without a saving."""
    if outcome.scope in TIMELESS:
        return outcome.scope
    if outcome.scope == "run":
        return f"{MINUS}{percent(outcome.share)}"
    return MINUS + duration(outcome.saving_ns) if saves(outcome) else UNKNOWN


def noise(outcome: Outcome) -> str:
    """Write how far a saving may be off, as "± 3.10 ms"; "" where it is not known, and for a bound."""
    known = saves(outcome) and 0 < outcome.error_ns < math.inf and not outcome.at_most
    return f"±{NBSP}{duration(outcome.error_ns)}" if known else ""


def speedup(outcome: Outcome) -> str:
    """Write how many times faster the step would be, as "1.44 ×", "≤ 1.44 ×" at most; a dash without a saving."""
    if not (saves(outcome) and outcome.speedup >= 1):
        return UNKNOWN
    return f"{'≤ ' if outcome.at_most and outcome.speedup <= 10 else ''}{times(outcome.speedup)}".replace(" ", NBSP)


def margin(outcome: Outcome) -> str:
    """Write how far a speed-up may be off, as "± 0.05"; "" where it is not known, and for a bound."""
    return f"±{NBSP}{_margin(outcome):.2f}" if _margin(outcome) else ""


def by_state(result: Result) -> dict[State, list[Outcome]]:
    """Group the outcomes by what the rules answered, in their order; each answer is there."""
    return {state: [o for o in result.outcomes if o.state == state] for state in get_args(State)}


def numbers(result: Result) -> dict[str, int]:
    """Return the number of the change that cures each finding; without changes the findings' own numbers."""
    of = {finding: n for n, change in reversed(list(enumerate(result.changes, 1))) for finding in change.findings}
    return of or {o.id: n for n, o in enumerate(result.found, 1)}


def gained(outcome: Outcome) -> str:
    """Write the same for a sentence: "at most 1.44 × faster (± 0.05)"; the margin where it is known."""
    margin = f" (±{NBSP}{_margin(outcome):.2f})" if _margin(outcome) else ""
    if outcome.at_most and outcome.speedup > 10:
        return f"{times(outcome.speedup)} faster at best"
    return f"{'at most ' if outcome.at_most else ''}{times(outcome.speedup)} faster{margin}"


def _margin(outcome: Outcome) -> float:
    """Return how far a speed-up may be off, as far as its two decimals show it; 0: not known, a bound, or absurd."""
    if not (saves(outcome) and 0 < outcome.error_ns < math.inf and 0 < outcome.share < 1 and outcome.speedup <= 10):
        return 0.0
    if outcome.at_most:
        return 0.0
    # The error of the step after, as a share of it, is that of the speed-up.
    then = outcome.saving_ns / outcome.share - outcome.saving_ns
    return max(0.01, outcome.error_ns / then * outcome.speedup)


def where(place: Place) -> str:
    """Return a line of the user's code and what is known of it: train.py:61 in main: DataLoader(data, batch_size=4)."""
    at = plain(f"{place.file}:{place.line}" if place.line else place.file, 120)
    function = f" in {plain(place.function, 80)}" if place.function not in ("", "<module>") else ""
    share = f"{percent(place.share)} of the stacks seen there" if place.share is not None else ""
    # A call that was written over several lines is joined to one.
    what = plain(place.what.replace("( ", "(").replace(", )", ")"), 300)
    return f"{at}{function}" + (f": {', '.join(filter(None, (share, what)))}" if share or what else "")


def edits(change: Change, most: int = 12) -> list[str]:
    """Return the lines that a change's diff takes out and puts in, with their signs; [] where it has none."""
    changed = [line for line in change.diff.split("\n") if line[:1] in ("-", "+") and line[:4] not in ("--- ", "+++ ")]
    return changed if len(changed) <= most else [*changed[: most - 1], f"… and {len(changed) - most + 1} more lines"]


def together(result: Result) -> str:
    """Write the bound on what all findings save together; "" where fewer than two have a saving, or it is too high."""
    most = result.together
    # Nobody has seen a job become ten times as fast: such a bound adds up savings that cannot all be had.
    if most is None or sum(saves(o) for o in result.found) < 2 or not 0 < most.speedup <= 10:
        return ""
    less = "" if any(o.scope == "run" for o in result.found) else f" ({MINUS}{duration(most.saving_ns)})"
    return f"All of these together: at most {times(most.speedup)} faster{less}."


def counted(n: int, one: str, many: str = "") -> str:
    """Write a number of things: "1 step", "412 steps"."""
    return f"{n:,}{NBSP}{one if n == 1 else many or one + 's'}"


def ranks(numbers: Iterable[int]) -> str:
    """Write ranks with neighbours joined: "rank 3", "ranks 0–3, 7"."""
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
    """Return what the breakdown is of: "step", or "trace" where the trace has no step markers."""
    return result.window.unit if result.window else "step"


def name(result: Result) -> str:
    """Name the run by its script: the word that ends in .py, the one after -m, else the program or the folder."""
    command = [plain(word) for word in result.run.command]
    chosen = next((word for word in command if word.endswith(".py")), None)
    if chosen is None:
        chosen = next((after for word, after in pairwise(command) if word == "-m" and after != "…"), None)
    if chosen is None:
        chosen = command[0] if command else plain(result.run.path)
    return plain(PurePosixPath(chosen.replace("\\", "/")).name or chosen, 60) or "run"


def recording(result: Result, option: str) -> str:
    """Write the command that records the job again with an option, as a shell takes it."""
    words = [plain(word, 300) for word in result.run.command]
    python = words[:1] and PurePosixPath(words[0]).name.startswith("python")
    job = words[1:] if python and (words[1:2] == ["-m"] or "".join(words[1:2]).endswith(".py")) else ["--", *words]
    return f"dlprof wrap {option} {command_line(job)}"


def devices(result: Result) -> str:
    """Write the devices as "4 × NVIDIA H200", or the number of ranks where the device is not known."""
    size = max(result.run.world_size, len(result.run.ranks))
    return f"{size}{NBSP}× {plain(result.run.device, 80)}" if result.run.device else counted(size, "rank")


def steps(result: Result) -> str:
    """Write the measured steps, their mean and, where known, MFU: "412 steady steps of 214.6 ms · 23 % MFU".

    Steps that grow are not called steady.
    """
    window = result.window
    if window is None:
        return "no steps recorded"
    if window.unit == "trace":
        return f"a trace of {duration(window.step_ns)} without step markers"
    used = f" · {percent(window.mfu)} MFU" if window.mfu is not None else ""
    micro = f" (1 step = {window.micro_batches} micro-batches)" if window.micro_batches > 1 else ""
    rate = f" · {throughput(window.throughput)}" if window.throughput else ""
    changes = any(one.id == "growing_steps" and one.state == "found" for one in result.outcomes)
    counts = counted(window.steps, "step" if changes else "steady step")
    mean = f"{duration(window.step_ns)} in the mean" if changes else duration(window.step_ns)
    return f"{counts} of {mean}{micro}{rate}{used}"


def throughput(t: Throughput) -> str:
    """Write samples and tokens a second: "305 samples/s, 39,040 tokens/s"; of a rank where the job's are not known."""
    both = ((t.samples_per_s, "samples/s"), (t.tokens_per_s, "tokens/s"))
    said = ", ".join(f"{digits(rate)}{NBSP}{unit}" for rate, unit in both if rate is not None)
    return f"{said} a rank" if t.of == "rank" else said


def all_traced(result: Result) -> bool:
    """Return whether only traced steps are known."""
    return result.window is not None and result.window.source == "trace"


def limits(result: Result) -> str:
    """Say how far the traced steps represent the job's; "" where nothing was traced."""
    window = result.window
    if window is None or window.unit != "step":
        return ""
    if window.overhead is not None:
        traced = counted(window.traced_steps, "traced step") if window.traced_steps else "the traced steps"
        return f"{traced} took {times(window.overhead)} as long as the others"
    if not all_traced(result):
        return ""
    if window.steps == 1:
        return "the only steady step was traced: how much tracing slows it, and how much steps vary, is not known"
    return "every steady step was traced: how much tracing slows them is not known"


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


def mean_shares(time: Sequence[TimePart]) -> dict[str, float]:
    """Return each category's share of the step, as the mean over ranks, largest first."""
    n = len({part.rank for part in time})
    sums: dict[str, float] = {}
    for part in time:
        sums[part.category] = sums.get(part.category, 0.0) + part.share
    return dict(sorted(((c, s / n) for c, s in sums.items()), key=lambda item: -item[1]))


def mean_ns(time: Sequence[TimePart]) -> dict[str, float]:
    """Return the parts of the mean step, ns by category, as the mean over ranks."""
    n = len({part.rank for part in time})
    sums: dict[str, float] = {}
    for part in time:
        sums[part.category] = sums.get(part.category, 0.0) + part.ns / n
    return sums


def outliers(time: Sequence[TimePart], count: int) -> list[int]:
    """Return up to `count` ranks whose breakdown differs most from the mean, the farthest first.

    Distance is half the sum of absolute differences of shares: the part of the step spent differently from the mean
    rank. Below 5 % bars look alike, and no rank is returned.
    """
    mean = mean_shares(time)
    away = {
        rank: sum(abs((parts[c].share if c in parts else 0.0) - share) for c, share in mean.items()) / 2
        for rank, parts in by_rank(time).items()
    }
    return sorted((r for r, d in away.items() if d >= 0.05), key=lambda r: -away[r])[:count]


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
    known = ("ns", "bytes", "share", "times")
    return next((u for u in known if column.endswith(f"_{u}") or column == u in ("share", "ns")), "")


def header(column: str) -> str:
    """Write a column's name as a heading, without the unit that its cells carry."""
    u = suffix(column)
    bare = column[: -len(u) - 1] or "time" if u in ("ns", "bytes", "times") else column
    return plain(bare.replace("_", " ") if u else bare, 60)
