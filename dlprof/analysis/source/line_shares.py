"""The lines of the user's files: which py-spy saw, by what the step was doing, and what those between the phases take.

Which line of the script calls which operators, as counted in the one step whose operators the recorder sees. The calls
of the user's that ranks recorded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct

from dlprof import schema
from dlprof.analysis import idioms, settings
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, across_ranks, maybe, needs, per_rank
from dlprof.analysis.estimate import UNKNOWN
from dlprof.analysis.host.stacks import (
    FRAME,
    LEAST_SAMPLES,
    NOTABLE_SHARE,
    PLACE,
    Way,
    callers,
    calling,
    is_own,
    own_lines,
    seen_doing,
    shown,
    training_functions,
    usual,
)
from dlprof.analysis.source.patches import Call, calls_of
from dlprof.analysis.timeline.stalls import periodic, stall_means
from dlprof.analysis.timeline.steps import phases_of_step
from dlprof.errors import NotMeasured
from dlprof.result import Change, Place
from dlprof.units import short

# The most rows that a rank passes on for each phase: the user's lines, and library functions with no user's line above.
MOST_LINES = 60
MOST_LIBRARY = 4

# Frames that only pass a call on say nothing of what was called.
_PASSED = re.compile(r"(_wrapped_call_impl|_call_impl|decorate_context|wrapper|inner|__call__|<module>)$")

_LINE = ["doing", "own", "file", "line", "function"]


@per_rank
def line_shares(stacks: Frame = needs(schema.STACKS), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return the lines that were seen: doing, own, file, line, function, library, samples, of.

    `doing`: fetch, forward, backward, optimizer, rest (none of these), or worker. A stack counts for the innermost line
    of the user's; `library`: the function of a library that it was seen in most under that line, "": in none. Where
    no line of the user's is in a stack (`own` is False) it counts for the library's innermost, without a line.
    `samples`: in this line; `of`: all of that doing. Files are named from the job's working directory. Raises
    NotMeasured where no stack was seen.
    """
    directory = str(rank.facts.get("directory") or "")
    seen: Counter[tuple[str, bool, str, int, str]] = Counter()
    under: dict[tuple[str, bool, str, int, str], Counter[str]] = {}
    of: Counter[str] = Counter()
    for doing, stack, n in seen_doing(stacks):
        of[doing] += n
        place, library = _innermost(stack, directory)
        key = (doing, *place)
        seen[key] += n
        under.setdefault(key, Counter())[library] += n
    rows = [(*key, under[key].most_common(1)[0][0], n, of[key[0]]) for key, n in seen.items()]
    frame = pd.DataFrame(rows, columns=[*_LINE, "library", "samples", "of"])
    frame = frame.sort_values(["doing", "own", "samples", "file", "line"], ascending=[True, False, False, True, True])
    nth = frame.groupby(["doing", "own"]).cumcount()
    return frame[nth < frame["own"].map({True: MOST_LINES, False: MOST_LIBRARY})].reset_index(drop=True)


def plays(lines: Maybe[pd.DataFrame], rank: int) -> bool:
    """Return whether a rank was seen, by its `line_shares`, in an environment of reinforcement learning."""
    frame, known = lines.or_none(), idioms.BY_NAME["games_played"].frames
    return frame is not None and any(re.search(known, text) for text in frame.loc[frame["rank"] == rank, "library"])


def _innermost(stack: list[str], directory: str) -> tuple[tuple[bool, str, int, str], str]:
    """Return the innermost line of the user's, and the library's function under it."""
    library = ""
    frames = [found for text in reversed(stack) if (found := FRAME.fullmatch(text)) is not None]
    for function, file, line in (found.groups() for found in frames):
        if is_own(file):
            return (True, file.removeprefix(directory), int(line), function), library
        if _PASSED.search(function) is None:
            # The outermost that says something: what the user's line called.
            library = f"{function} ({PLACE.sub('', file)})"
    function, file, _ = frames[0].groups() if frames else ("unknown", "", "0")
    return (False, PLACE.sub("", file), 0, function), ""


# Fewer samples than LEAST_SAMPLES show a line if this share of at least so many is in it: a line that takes half of the
# time is in it by chance in one of thirty cases.
_FEW, _NEARLY_ALL = 8, 0.8

# How the second half of an advice begins, of a line between the phases.
RARER = "; if its result is only shown or logged"

# The lines of a loop are no further than this from each other, mostly.
AROUND = 3

# A line is called what at least this share of its samples is.
_NAMED = 0.25

# In such a line the loop is left, and what it held is freed: that is no part of a step.
_LEAVES = ("break", "return")

# In these a worker, or the training thread without workers, makes a batch, or a sampler says what is in it; elsewhere a
# worker waits, or sends.
_MAKES = re.compile(r"torch[/\\]utils[/\\]data[/\\]_utils[/\\]fetch\.py|_next_index \(.*torch")

# Frames of an import, and lines that ask for one; functions that only begin a script.
_IMPORTS, _IMPORT = "<frozen importlib._bootstrap", re.compile(r"(import|from) ")
_BEGINS = ("<module>", "main", "_main", "run", "cli", "train")

# In these the training thread waits for a batch of its workers.
_AWAITS = re.compile(r"(_(try_)?get_data|_shutdown_workers) \(.*torch[/\\]utils[/\\]data[/\\]dataloader\.py")


def texts_of(rank: RankFacts) -> dict[tuple[str, int], str]:
    """Return the source of lines that a rank was seen in, by file and line, as far as it was recorded with the stacks.

    The stacks must have been read before: `needs(schema.STACKS)`.
    """
    lines = (rank.trace_facts.get("stacks") or {}).get("lines") or []
    return {(str(one["file"]), int(one["line"])): str(one["text"]) for one in lines}


def _loops_of(rank: RankFacts) -> dict[tuple[str, int], tuple[str, int]]:
    """Return the first line of the loop that a line of a rank is in, of loops which are not that of the training."""
    lines = (rank.trace_facts.get("stacks") or {}).get("lines") or []
    return {(f := str(one["file"]), int(one["line"])): (f, int(one["loop"])) for one in lines if one.get("loop")}


@per_rank
def costly_lines(stacks: Frame = needs(schema.STACKS), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return the user's lines that were seen most: doing, function, file, line, text, idiom, callers, hands_over,
    samples, of.

    `doing`: as in `line_shares`; of workers, and of waiting for a loader without workers, only the making of batches
    counts. `text`: the line's source, "" where it was not recorded. `idiom`: a name of `idioms.IDIOMS`, "": none.
    `callers`: which lines call the function that it is in, as function, file, line: the last one, and the one in the
    training loop, `forward` or `__getitem__`; () where it is in there itself, or is called from different places.
    `hands_over`: it leaves the training to a library. `samples`: in this line and what it calls in libraries; `of`: all
    of that doing.
    """
    making = [one for one in seen_doing(stacks) if one[0] not in idioms.DATA or any(map(_MAKES.search, one[1]))]
    table = _costly(making, rank, idioms.BY_NAME["rows_of_tensors"] if _reads_tensors(rank) else None)
    known = _of_transforms(settings.loader_of(rank.facts).get("transforms") or [])
    of_pictures = table["doing"].isin(idioms.DATA) & table["idiom"].isin(idioms.OF_PICTURES)
    return table.assign(idiom=table["idiom"].mask(of_pictures, known)) if known else table


def _reads_tensors(rank: RankFacts) -> bool:
    """Return whether all that a rank's loaders do is to take rows out of tensors and to put them together again."""
    loaders = rank.facts.get("loaders") or []
    return bool(loaders) and all(
        one.get("dataset") == "TensorDataset"
        and one.get("batch_size")
        and (one.get("collate") or {}).get("name") == "default_collate"
        for one in loaders
    )


def _of_transforms(names: Sequence[str]) -> str:
    """Return the idiom of work on pictures by their transforms, in order; "": these say nothing of it."""
    before = next((names[:n] for n, name in enumerate(names) if name in idioms.CROPS), [])
    if not idioms.CHEAP.issuperset(before):
        return idioms.CROPPED_LATE
    return idioms.SAME_PICTURES if names and idioms.DRAW_NOTHING.issuperset(names) else ""


@per_rank
def start_lines(stacks: Frame = needs(schema.STACKS), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return the same of the time before the first step was done, and `via`: the line of the script that led there.

    `doing`: start; start_wait: waiting for a batch of workers; start_worker: what these made meanwhile. `via` has
    function, file and line; it is the same place where nothing is between. Raises NotMeasured where the start was not
    looked at.

    The first step itself is left out: backward passes, optimizers, and models called where steps call them, too.
    """
    known = stacks[stacks["role"].isin(("start", "start_worker"))]
    later = stacks[(stacks["role"] == "main") & (stacks["phase"] == "forward")]
    steps = {calling(text.split(";")) for text in later["stack"]} - {None}
    if not known["samples"].sum():
        raise NotMeasured("the stacks of the start were not recorded")
    texts, seen = texts_of(rank), []
    directory = str(rank.facts.get("directory") or "")
    ways: dict[tuple[str, str, int], Counter[tuple[str, str, int]]] = {}
    for role, phase, text, n in zip(known["role"], known["phase"], known["stack"], known["samples"], strict=True):
        stack = text.split(";")
        if phase in ("backward", "optimizer") or (phase == "forward" and calling(stack) in steps):
            continue
        own = [(f[1], f[2], int(f[3])) for frame in stack if (f := FRAME.fullmatch(frame)) and is_own(f[2])]
        if role == "start_worker":
            seen += [("start_worker", stack, n)] if any(map(_MAKES.search, stack)) else []
            continue
        if not own:
            continue  # cut off by the sampler: what led there is not known
        if own and _IMPORTS in text and _IMPORT.match(texts.get(own[-1][1:], "import")) is None:
            # A library that imports its own parts when it is used: no line of the script can help that.
            stack, own = [frame for frame in stack if not ((f := FRAME.fullmatch(frame)) and is_own(f[2]))], []
        seen.append(("start_wait" if any(_AWAITS.search(frame) for frame in stack) else "start", stack, n))
        if own:
            place, way = own[-1], next((one for one in own if one[0] not in _BEGINS), own[-1])
            led = own[own.index(way) - 1] if own.index(way) else way
            ways.setdefault((place[0], place[1].removeprefix(directory), place[2]), Counter())[led] += n
    table = _costly(seen, rank)
    via: list[tuple[str, str, int]] = []
    for row in table.to_dict("records"):
        place = (str(row["function"]), str(row["file"]), int(row["line"]))
        function, file, line = ways[place].most_common(1)[0][0] if place in ways else place
        via.append((function, file.removeprefix(directory), line))
    return table.assign(via=pd.Series(via, index=table.index, dtype=object))


def _costly(
    stacks: Sequence[tuple[str, list[str], int]], rank: RankFacts, of_data: idioms.Idiom | None = None
) -> pd.DataFrame:
    """Return the lines as `costly_lines` does; `of_data`: what the making of a batch is where no line says more."""
    texts, loops, steps = texts_of(rank), _loops_of(rank), training_functions(stacks)
    trains = _hand_over(stacks)
    ways: dict[tuple[str, str, str, int], Counter[Way]] = {}
    seen: dict[tuple[str, str, str, int], Counter[str]] = {}
    of: Counter[str] = Counter()
    for doing, stack, n in stacks:
        at = next((i for i in reversed(range(len(stack))) if (f := FRAME.fullmatch(stack[i])) and is_own(f[2])), None)
        frame = None if at is None else FRAME.fullmatch(stack[at])
        if frame is not None and doing == "rest" and texts.get((frame[2], int(frame[3]))) in _LEAVES:
            continue
        of[doing] += n
        if at is not None and frame is not None:
            place = frame[1], frame[2], int(frame[3])
            text, below = texts.get(place[1:], ""), stack[at + 1 :]
            if place[1:] in trains:  # how the library calls modules and optimizers is not the script's to change
                text, below = "", [one for one in below if not _OF_MODULES.search(one)]
            found = idioms.known(text, (f"{frame[1]} ()", *below), doing)
            # In the making of a sample, nothing of a library is seen below it: functions of C, or Python's own work.
            if found is None and place[1:] in loops and (doing == "rest" or at == len(stack) - 1):
                of_loop = idioms.known(texts.get(loops[place[1:]], ""), (), doing)
                found = of_loop or idioms.BY_NAME[idioms.LOOPS]
            found = found or (of_data if doing in idioms.DATA else None)
            seen.setdefault((doing, *place), Counter())[found.name if found else ""] += n
            ways.setdefault((doing, *place), Counter())[callers(stack, at, steps)] += n
    directory, rows = str(rank.facts.get("directory") or ""), []
    for (doing, function, file, line), names in seen.items():
        samples = names.total()
        name, times = max(((k, n) for k, n in names.items() if k), key=lambda of: of[1], default=("", 0))
        text = texts.get((file, line), "")
        named = name if times >= _NAMED * samples else ""
        way = usual(ways[doing, function, file, line], directory)
        short_file, over = file.removeprefix(directory), (file, line) in trains
        rows.append((doing, function, short_file, line, text, named, way, over, samples, of[doing]))
    columns = ["doing", "function", "file", "line", "text", "idiom", "callers", "hands_over", "samples", "of"]
    table = pd.DataFrame(rows, columns=columns).sort_values(["doing", "samples"], ascending=[True, False])
    return table[table.groupby("doing").cumcount() < MOST_LINES].reset_index(drop=True)


# The frames of PyTorch's own with which a line may begin a backward pass.
_OF_TORCH = re.compile(r"[/\\]torch[/\\]")
_OF_MODULES = re.compile(r"[/\\]torch[/\\](nn|optim)[/\\]")


def _hand_over(stacks: Sequence[tuple[str, list[str], int]]) -> set[tuple[str, int]]:
    """Return the file and line of those that leave the training to a library, as `trainer.fit(model)` does.

    Such a line is in all that the training does, and its own text says nothing of it.
    """
    found: set[tuple[str, int]] = set()
    for doing, stack, _ in stacks:
        if doing != "backward":
            continue
        at = next((i for i in reversed(range(len(stack))) if (f := FRAME.fullmatch(stack[i])) and is_own(f[2])), None)
        frame = None if at is None else FRAME.fullmatch(stack[at])
        if frame is not None and at is not None and at + 1 < len(stack) and not _OF_TORCH.search(stack[at + 1]):
            found.add((frame[2], int(frame[3])))
    return found


# `dist` may be a distribution as well.
_COLLECTIVE = re.compile(
    r"\b(dist|distributed)\.(all_\w+|broadcast\w*|(reduce_)?scatter\w*|reduce|gather\w*|(monitored_)?barrier|i?send|i?recv)\("
    r"|\b((all_)?gather|broadcast|scatter)_object(_list)?\("
)
_FROM_ONE = re.compile(r"\b(broadcast|scatter)(_object_list)?\(")


class CostlyLine(Struct, frozen=True):
    """The line of the user's that takes most of something: its share, and what it is known to be."""

    place: Place  # with its share of the samples
    callers: tuple[Place, ...]  # the line that calls the place's function, and the one in the loop that leads there
    share: float  # of the samples, with the lines around it in the same function, as of a loop, or all of these
    text: str
    idiom: idioms.Idiom | None
    hands_over: bool = False  # it leaves the training to a library, and nothing is known of what that does there

    @property
    def shown(self) -> str:
        """The line as a report names it: decode (data.py:41), with its source where that was recorded."""
        named = shown(self.place.function, self.place.file, self.place.line)
        return f"{named}, `{short(self.text, 80)}`," if self.text else named

    @property
    def does(self) -> str:
        """What the line is known to do, as a sentence without its full stop; "": not known."""
        named = shown(self.place.function, self.place.file, self.place.line)
        return "" if self.idiom is None else f"{named} {self.idiom.what}"

    @property
    def is_collective(self) -> bool:
        """Whether the line calls a collective, in which it waits for other ranks: objects, as any tensor of gloo's, are
        sent without an operator.
        """
        return _COLLECTIVE.search(self.text) is not None

    @property
    def is_from_one(self) -> bool:
        """Whether the line is a collective in which one rank sends, and the others get what it has made."""
        return _FROM_ONE.search(self.text) is not None

    def advice(self, otherwise: str = "make this line faster:", *, between: bool = False) -> str:
        """Say what to change: the remedy of what the line is known to be; where none is known, `otherwise` and so.

        `between`: it stands between the phases, as a metric does, which not every step may need.
        """
        at = shown("", self.callers[-1].file, self.callers[-1].line) if self.callers else ""
        rarer = f"{RARER}, do it in the steps that are shown{at}" if between else ""
        if self.idiom is None:
            return f"{otherwise} {self.shown.rstrip(',')} ({UNKNOWN}){rarer}"
        return f"{self.idiom.remedy}: {self.shown} {self.idiom.what} ({self.idiom.link}){rarer}"


def in_library(line: CostlyLine) -> Change | None:
    """Return what is said of a line that leaves the training to a library; None: it does not, or more is known."""
    if not line.hands_over:
        return None
    what = f"no remedy is known to dlprof: this is the library's own Python, called by {line.shown}"
    return Change(what.rstrip(","), informs=True)


def _says(text: str, idiom: str) -> bool:
    known = idioms.BY_NAME.get(idiom)
    return known is not None and not known.last and bool(known.source and re.search(known.source, text))


def costliest(lines: Maybe[pd.DataFrame], rank: int, *doing: str) -> CostlyLine | None:
    """Return the line that a rank was seen in most while doing one of these.

    None where stacks were not recorded, are too few, or show no line in particular.
    """
    frame = lines.or_none()
    if frame is None:
        return None
    mine = frame[(frame["rank"] == rank) & frame["doing"].isin(doing)]
    of = int(mine.drop_duplicates("doing")["of"].sum())
    # A few samples say enough where nearly all of them are in one line.
    least = NOTABLE_SHARE if of >= LEAST_SAMPLES else _NEARLY_ALL if of >= _FEW else np.inf
    if not len(mine) or mine["samples"].max() < least * of:
        return None
    # Of two lines that take about as long, the one whose own text says what it does is known better.
    hot = mine[mine["samples"] >= _ABOUT * mine["samples"].max()].sort_values("samples", ascending=False)
    top = min(hot.to_dict("records"), key=lambda row: not _says(row["text"], row["idiom"]))
    top = _calling(mine, top)
    place = Place(str(top["file"]), int(top["line"]), str(top["function"]), share=float(top["samples"] / of))
    name = str(top["idiom"])
    if name in ("", idioms.LOOPS) and top["function"] != "<module>":
        # A loop of several lines is known by any of them, and better than as a loop.
        whole = mine[(mine["function"] == top["function"]) & (mine["file"] == top["file"])]
        known = whole[~whole["idiom"].isin(("", idioms.LOOPS))].groupby("idiom")["samples"].sum()
        name = str(known.idxmax()) if len(known) and known.max() >= _NAMED * whole["samples"].sum() else name
    # Of the lines that do one thing, as the body of a `with`, the one whose own text says it is where it is changed.
    alike = mine[(mine["function"] == top["function"]) & (mine["file"] == top["file"]) & (mine["idiom"] == name)]
    says = [row for row in alike.to_dict("records") if _says(row["text"], name)]
    if says and top["idiom"] == name and not _says(top["text"], name):
        top = {**says[0], "samples": int(alike["samples"].sum())}
        place = Place(str(top["file"]), int(top["line"]), str(top["function"]), share=float(top["samples"] / of))
    near = mine[(mine["function"] == top["function"]) & (mine["file"] == top["file"])]
    # Of a function that makes constants, all is as needless as its first line.
    if not (top["callers"] and name in idioms.OF_FUNCTIONS):
        near = near[(near["line"] - top["line"]).abs() <= AROUND]
    callers = tuple(Place(file, line, caller) for caller, file, line in top["callers"])
    share = float(near["samples"].sum() / of)
    over = not name and bool(top.get("hands_over"))
    return CostlyLine(place, callers, share, str(top["text"]), idioms.BY_NAME.get(name), over)


def _calling(lines: pd.DataFrame, top: dict[str, Any]) -> dict[str, Any]:
    """Return the line that calls the one seen most, with what was seen below it, where most is below that line.

    A function may do one thing in many lines, or in several functions, of which none takes much: what they are, by what
    they call in libraries, is then what the line that calls them all is.
    """
    if not top["callers"] or not top["idiom"] or _says(top["text"], top["idiom"]):
        return top
    function, file, line = top["callers"][0]
    below = lines[[bool(way) and way[0] == top["callers"][0] for way in lines["callers"]]]
    itself = lines[(lines["file"] == file) & (lines["line"] == line)]
    samples = int(below["samples"].sum())
    if samples < 2 * top["samples"] or below.loc[below["idiom"] == top["idiom"], "samples"].sum() < samples / 2:
        return top
    text, callers = (itself.iloc[0]["text"], itself.iloc[0]["callers"]) if len(itself) else ("", top["callers"][1:])
    here = {"function": function, "file": file, "line": line, "text": text, "callers": callers}
    return {**top, **here, "samples": samples + int(itself["samples"].sum())}


# The share of the samples of the line seen most from which another one takes about as long.
_ABOUT = 0.85


def over_ranks(shares: pd.DataFrame) -> pd.DataFrame:
    """Return the sum of `line_shares` over the ranks, with `share` = samples / of; the line seen most first."""
    of = shares.groupby(["rank", "doing"])["of"].first().groupby("doing").sum()
    by = shares.sort_values("samples", ascending=False).groupby(_LINE, as_index=False, sort=False)
    lines = by.agg({"library": "first", "samples": "sum"})
    lines = lines.assign(of=lines["doing"].map(of))
    return lines.assign(share=lines["samples"] / lines["of"]).sort_values(
        ["samples", "file", "line"], ascending=[False, True, True], ignore_index=True
    )


# A loop's work may be done in a function that it calls; a third place says no more. The second has at least this share
# of the calls of the first.
_MOST, _NOTABLE = 2, 0.25


def busiest(facts: Mapping[str, Any], phase: str, after: str, names: Collection[str]) -> tuple[Place, ...]:
    """Return the line that calls operators of these names most often, and that of the next function that calls them.

    `phase`: the phase that it is in, "" between the phases; `after`: the phase that ended last before it, or that one.
    Empty where none was recorded.
    """
    found: dict[tuple[str, str], tuple[int, Place]] = {}
    for one in (facts.get("flops") or {}).get("lines") or []:
        calls = sum(n for name, n in (one.get("operators") or {}).items() if name in names)
        if one.get("phase") == phase and one.get("after") == after and calls:
            place = Place(str(one["file"]), int(one["line"]), str(one["function"]), what=str(one["source"]))
            key = (place.file, place.function)
            found[key] = max(found.get(key, (0, place)), (calls, place), key=lambda of: of[0])
    ordered = sorted(found.values(), key=lambda of: -of[0])
    return tuple(place for calls, place in ordered[:_MOST] if calls >= _NOTABLE * ordered[0][0])


@across_ranks
def call_sites(job: Job = needs(JOB)) -> list[Call]:
    """Return the calls of the script that were recorded, each once over all ranks; none of foreign traces."""
    return calls_of(job.facts[rank] for rank in job.ranks)


@across_ranks
def lines_between(
    own_lines: Frame = needs(own_lines),
    phases_of_step: Frame = needs(phases_of_step),
    stall_means: Maybe[Frame] = maybe(stall_means),
    periodic: Maybe[Frame] = maybe(periodic),
    call_sites: Maybe[list[Call]] = maybe(call_sites),
) -> pd.DataFrame:
    """Return what the script's lines between the phases take of the mean steady step: rank, function, file, line, ns.

    The stacks say how the time divides, the step log how much it is, without stalls and what comes every n-th step.
    `noise_ns` is the error of the share of so few samples. Lines of a loss, also of one that the script writes out, or
    of setting gradients to zero are left out. Raises NotMeasured where too few stacks were seen between the phases.
    """
    lines = own_lines[(own_lines["doing"] == "rest") & ~own_lines["trains"].astype(bool)]
    if not len(lines) or lines["samples"].max() < LEAST_SAMPLES:
        raise NotMeasured("too few stacks were seen between the phases of the steps")
    losses = [call for call in call_sites.or_none() or () if call.kind == "loss"]
    places = zip(lines["file"].astype(str), lines["line"], strict=True)
    lines = lines[[not any(is_at(call, file, line) for call in losses) for file, line in places]]
    rest = phases_of_step[phases_of_step["phase"] == "rest"].set_index("rank")["ns"]
    for known, column in ((stall_means.or_none(), "mean_ns"), (periodic.or_none(), "cost_ns")):
        if known is not None and len(known):
            rest = rest - known.groupby("rank")[column].sum().reindex(rest.index).fillna(0.0)
    share = lines["seen"] / lines["samples"]
    of = lines["rank"].map(rest.clip(lower=0.0)).astype(float)
    noise = np.sqrt(share * (1 - share) / lines["samples"]) * of
    return lines.assign(ns=share * of, noise_ns=noise)[["rank", "function", "file", "line", "ns", "noise_ns"]]


def is_at(call: Call, file: str, line: int) -> bool:
    """Return whether a recorded call, whose file may be named from the script's folder, is on a line."""
    return call.line <= line <= max(call.span.end_line, call.line) and file.endswith(call.file)
