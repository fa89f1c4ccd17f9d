"""Which Python functions a rank and its loader workers were seen in while the step was doing what.

By dlprof's own samples of stacks, by the profiles of other tools, and by the line for functions that `--lines` names.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd

from dlprof import schema
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, across_ranks, needs, per_rank
from dlprof.errors import NotMeasured
from dlprof.result import Place
from dlprof.units import percent

# What the training thread was doing, and its workers, in words.
COMPUTING = ("forward", "backward", "optimizer")
DOING = {
    "rest": "between the phases",
    **{phase: phase for phase in COMPUTING},
    "fetch": "waiting for the loader",
    "worker": "loader worker",
}

_ROLES = ("main", "worker")

# The most functions that a rank passes on for each of these, the user's own and those of libraries: most samples first.
MOST_OWN = 24
MOST_LIBRARY = 8

# A rank passes on frames of the tree of calls with at least this share of all samples, as deep as a screen is high.
LEAST_FRAME = 1 / 250
MOST_FRAMES = 400
MOST_DEPTH = 40

# The most functions with timed lines that a rank passes on, those with the most time first, and the lines of each.
MOST_FUNCTIONS = 12
MOST_LINES = 200

# Frames that only pass a call on.
_PASSED = re.compile(r"(?:\w+\.)*(?:_wrapped_call_impl|_call_impl|decorate_context|wrapper|inner) \(.*torch[/\\]")

# A function is worth naming in a finding from this share of the samples on, and where there are this many: below, a
# share is off by a tenth and more.
NOTABLE_SHARE = 0.2
LEAST_SAMPLES = 25

FRAME = re.compile(r"(.*) \((.*):(\d+)\)")
# Inductor's code has a name of its own in whatever folder its cache is.
_INSTALLED = re.compile(
    r"^<|[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python[0-9.]+[/\\]"
    r"|[/\\]torchinductor_|[/\\][a-z2-7]{2}[/\\]c[a-z2-7]{51}\.py$"
)
PLACE = re.compile(r".*[/\\](?:(?:site|dist)-packages|lib[/\\]python[0-9.]+)[/\\]")


@per_rank
def hottest(stacks: Frame = needs(schema.STACKS)) -> pd.DataFrame:
    """Return the functions that were seen most: doing, function, file, line, own, alone, total, samples.

    `doing`: what the training thread was doing (fetch, forward, backward, optimizer; rest: none of these), or worker.
    `own`: a file of the user's, not of Python or an installed package. `alone`: samples in the function; in one of the
    user's also those in library code that it had called. `total`: with all that it had called. `line`: the one seen
    most in `alone`. `samples`: all of the doing. Ordered by doing, own first, then by `alone` and `total`.
    """
    seen = [*seen_doing(stacks)]
    samples: Counter[str] = Counter()
    for doing, _, n in seen:
        samples[doing] += n
    frame = _most_seen(seen)
    return frame.assign(samples=frame["doing"].map(samples))


_FUNCTION = ["doing", "function", "file", "line", "own", "alone", "total"]


def _most_seen(stacks: Iterable[tuple[str, list[str], int]]) -> pd.DataFrame:
    """Return the functions that were seen most, with the columns and in the order of `hottest`, but for its samples."""
    lines: dict[tuple[str, str, str], Counter[int]] = defaultdict(Counter)
    total: Counter[tuple[str, str, str]] = Counter()
    for doing, stack, n in stacks:
        frames = frames_of(stack)
        total.update({(doing, function, file): n for function, file, _ in frames})
        own = [frame for frame in frames if is_own(frame[1])]
        for function, file, line in {*frames[-1:], *own[-1:]}:
            lines[doing, function, file][line] += n
    rows = []
    for key, n in total.items():
        line = lines[key].most_common(1)[0][0] if key in lines else 0
        rows.append((*key, line, is_own(key[2]), lines[key].total(), n))
    frame = pd.DataFrame(rows, columns=_FUNCTION)
    by = ["place", "own", "alone", "total", "function"]
    frame = frame.assign(place=frame["doing"].map(["", *DOING].index))
    frame = frame.sort_values(by, ascending=[True, False, False, False, True])
    nth = frame.groupby(["doing", "own"]).cumcount()
    return frame.loc[nth < frame["own"].map({True: MOST_OWN, False: MOST_LIBRARY}), _FUNCTION].reset_index(drop=True)


@per_rank
def flame(stacks: Frame = needs(schema.STACKS)) -> pd.DataFrame:
    """Return the tree of calls: doing, parent (its row, -1: none), name, own, samples; each parent before its children.

    Small frames, and those deeper than a screen shows, are left out: what is missing of a parent was there, or its own.
    """
    ours = stacks[stacks["profile"] == ""]
    if ours.empty:
        raise NotMeasured("dlprof saw no Python stacks")
    return tree(seen_doing(ours), int(ours.loc[ours["role"].isin(_ROLES), "samples"].sum()))


def tree(seen: Iterable[tuple[str, list[str], int]], whole: int) -> pd.DataFrame:
    """Return the tree of calls, as `flame` does, of stacks: what was done, frames, how often; `whole`: all of them."""
    shorter: dict[str, str] = {}
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for doing, stack, n in seen:
        for text in stack:
            if text not in shorter:
                shorter[text] = "" if _PASSED.match(text) else FRAME.sub(r"\1 (\2)", text)
        path = tuple(filter(None, map(shorter.get, stack)))[:MOST_DEPTH]
        for depth in range(1, len(path) + 1):
            counts[doing, path[:depth]] += n
    least = LEAST_FRAME * whole
    kept = sorted((key for key, n in counts.most_common(MOST_FRAMES) if n >= least), key=lambda key: len(key[1]))
    row = {key: at for at, key in enumerate(kept)}
    rows = [(doing, row.get((doing, path[:-1]), -1), path[-1], counts[doing, path]) for doing, path in kept]
    frame = pd.DataFrame(rows, columns=["doing", "parent", "name", "samples"])
    return frame.assign(own=[is_own(name.rpartition(" (")[2].rstrip(")")) for name in frame["name"]])


def frames_of(stack: Iterable[str]) -> list[tuple[str, str, int]]:
    """Return the frames of a stack, the outermost first: function, file, line."""
    return [(f[1], f[2], int(f[3])) for f in map(FRAME.fullmatch, stack) if f is not None]


def of_training(stacks: pd.DataFrame) -> pd.DataFrame:
    """Return the stacks with a known activity of the step: dlprof's own samples, else a profile's with phases.

    The profile of a whole job has start-up and more outside the phases: that is left out. Raises NotMeasured where
    there is none.
    """
    ours = stacks[stacks["profile"] == ""]
    if len(ours) or stacks.empty:
        return ours
    phased = stacks[(stacks["phase"] != "") | (stacks["role"] == "worker")]
    if phased.empty:
        return phased
    mine = phased[phased["profile"] == phased["profile"].iloc[0]]
    # Where they are weighed by time, the lightest is taken for one sample: a share is as sure as samples are many.
    lightest = 1 if str(mine["unit"].iloc[0]) == "samples" else max(int(mine["samples"].min()), 1)
    counted: pd.DataFrame = mine.assign(samples=-(-mine["samples"] // lightest))
    return counted


def seen_doing(stacks: pd.DataFrame) -> Iterator[tuple[str, list[str], int]]:
    """Return each stack of the training thread and the workers: what it was doing, its frames, how often it was seen.

    Raises NotMeasured where there is none.
    """
    known = of_training(stacks)
    table = known[known["role"].isin(_ROLES)]
    if not table["samples"].sum():
        raise NotMeasured("no Python stack of the training thread was seen")
    for role, phase, stack, n in zip(table["role"], table["phase"], table["stack"], table["samples"], strict=True):
        yield "worker" if role == "worker" else phase if phase in DOING else "rest", stack.split(";"), n


@per_rank
def line_times(lines: Frame = needs(schema.LINES)) -> pd.DataFrame:
    """Return the table "lines" without functions that never ran: the longest function first, its lines in order.

    A long function is cut to the lines that took longest. Raises NotMeasured where nothing was counted.
    """
    rows = lines.astype({"role": str, "function": str, "file": str, "source": str})
    functions = [part for _, part in rows.groupby(["role", "function", "file"]) if part["hits"].any()]
    if not functions:
        raise NotMeasured("no function that --lines names was called while its lines were counted")
    functions.sort(key=lambda part: -int(part["dur_ns"].sum()))
    longest = [part.nlargest(MOST_LINES, "dur_ns").sort_values("line") for part in functions[:MOST_FUNCTIONS]]
    return pd.concat(longest, ignore_index=True)


# Where a phase begins in PyTorch, as read/stacks.py sees it: the caller's line is the script's.
PHASE_BEGINS = re.compile(r"torch[/\\](?:nn[/\\]modules[/\\]module|_tensor|autograd[/\\]__init__|utils[/\\]data|optim)")

# What a step of training cannot do without, though it lies in no phase: losses, gradients set to zero, and exchanges
# with other ranks, which have rules of their own.
_TRAINING = re.compile(
    r"torch[/\\](?:nn[/\\]functional|optim[/\\]|amp[/\\]|nn[/\\]utils[/\\]clip_grad|distributed[/\\])"
)

# The most lines that a rank passes on.
MOST_CALLS = 60


# What Python calls the body of an expression in a function.
_INNER = re.compile(r"(\.<locals>)?\.<(genexpr|listcomp|dictcomp|setcomp|lambda)>$")

# The lines that lead to a function, as function, file and line: what calls it, and what leads there.
Way = tuple[tuple[str, str, int], ...]

# One way to a line is named from this share of its samples on.
_MOSTLY = 0.7

# A function that PyTorch wraps, as by `torch.no_grad()`, is called by the line before.
_DECORATES = re.compile(r"(^|\.)(decorate_context|wrapper|inner|_fn)$")


def calling(stack: list[str]) -> tuple[str, str, int] | None:
    """Return the user's line that begins a phase of the step, as function, file, line; None where none does."""
    before = itertools.takewhile(lambda text: PHASE_BEGINS.search(text) is None, stack)
    own = [f for text in before if (f := FRAME.fullmatch(text)) and is_own(f[2])]
    return (own[-1][1], own[-1][2], int(own[-1][3])) if own else None


def training_functions(stacks: Iterable[tuple[str, list[str], int]]) -> set[tuple[str, str]]:
    """Return the functions of the user's, with their files, that call `backward` or the optimizer."""
    found: set[tuple[str, str]] = set()
    for doing, stack, _ in stacks:
        if doing in ("backward", "optimizer"):
            found.update(place[:2] for place in [calling(stack)] if place)
    return found


def callers(stack: list[str], at: int, trains: set[tuple[str, str]]) -> Way:
    """Return the lines that lead to the function of frame `at`: that which calls it, and that in the function which
    trains (`trains`), else the outermost of a model's or a data set's own; () where it is that function itself.
    """
    way: list[tuple[str, str, int]] = []
    for text in reversed(stack[: at + 1]):
        frame = FRAME.fullmatch(text)
        if frame is None:  # the script's main part leads to everything
            way = way[:2]
            break
        if is_own(frame[2]):
            way.append((_INNER.sub("", frame[1]), frame[2], int(frame[3])))
        elif not _DECORATES.search(frame[1]):
            break
        if way[-1][:2] in trains:
            break
    calls = [one for one in way[1:] if one[:2] != way[0][:2]]
    return tuple(dict.fromkeys((*calls[:1], *calls[-1:])))


def usual(ways: Counter[Way], directory: str) -> Way:
    """Return the most common way, files named from a directory; (): there is none that most samples have."""
    way, often = ways.most_common(1)[0]
    return tuple((f, file.removeprefix(directory), n) for f, file, n in way) if often >= _MOSTLY * ways.total() else ()


@per_rank
def own_lines(stacks: Frame = needs(schema.STACKS), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return the user's lines that the training thread was seen in: doing, function, file, line, trains, callers, seen,
    samples.

    In a phase, the line that called what begins it; between the phases the innermost one. `trains`: it was in a
    loss, in the setting of gradients to zero, or in an exchange. `callers`: what leads there, as a `Way`. `seen`: of
    the `samples` of the doing. The most seen first.
    """
    seen: Counter[tuple[str, str, str, int, bool]] = Counter()
    samples: Counter[str] = Counter()
    ways: dict[tuple[str, str, str, int, bool], Counter[Way]] = defaultdict(Counter)
    known = list(seen_doing(stacks))
    training = training_functions(known)
    for doing, stack, n in known:
        samples[doing] += n
        if doing == "worker":
            continue
        if doing != "rest":
            stack = list(itertools.takewhile(lambda text: PHASE_BEGINS.search(text) is None, stack)) or stack
        at = next((i for i in reversed(range(len(stack))) if (f := FRAME.fullmatch(stack[i])) and is_own(f[2])), None)
        if at is not None:
            frame, *below = frames_of(stack[at:])
            place = (doing, *frame, bool(below and _TRAINING.search(below[0][1])))
            seen[place] += n
            ways[place][callers(stack, at, training)] += n
    directory = str(rank.facts.get("directory") or "")
    rows = [
        (doing, function, file.removeprefix(directory), line, trains, usual(ways[at], directory), n, samples[doing])
        for at, n in seen.most_common(MOST_CALLS)
        for doing, function, file, line, trains in (at,)
    ]
    return pd.DataFrame(rows, columns=["doing", "function", "file", "line", "trains", "callers", "seen", "samples"])


def is_own(file: str) -> bool:
    """Return whether a file is the user's: not Python's, not an installed package's, not generated by Inductor."""
    return _INSTALLED.search(file) is None


def shown(function: str, file: str, line: int = 0) -> str:
    """Name a function as a report does: decode (data.py:41)."""
    if file == "<unknown>":
        return function
    function = _INNER.sub("", function)
    name = re.split(r"[/\\]", file)[-1] if is_own(file) else PLACE.sub("", file)
    return f"{function} ({name}:{line})" if line else f"{function} ({name})"


def hottest_place(hottest: Maybe[pd.DataFrame], rank: int, *doing: str) -> Place | None:
    """Return the user's function that a rank was seen in most while doing one of these, with its share of the stacks.

    None where stacks were not recorded, are too few, or show no function in particular.
    """
    frame = hottest.or_none()
    if frame is None:
        return None
    seen = frame[(frame["rank"] == rank) & frame["doing"].isin(doing)]
    samples = int(seen.drop_duplicates("doing")["samples"].sum())
    mine = seen[seen["own"].astype(bool) & (seen["function"] != "<module>")]
    alone = mine.groupby(["function", "file"])["alone"].transform("sum").to_numpy()
    if samples < LEAST_SAMPLES or alone.max(initial=0) < NOTABLE_SHARE * samples:
        return None
    top = mine.iloc[int(alone.argmax())]
    return Place(str(top["file"]), int(top["line"]), str(top["function"]), share=float(alone.max() / samples))


def hottest_own(hottest: Maybe[pd.DataFrame], rank: int, *doing: str) -> str:
    """Name `hottest_place` as a sentence with a space first; "": there is none."""
    place = hottest_place(hottest, rank, *doing)
    if place is None or place.share is None:
        return ""
    while_doing = " or ".join(DOING[one] for one in doing)
    where = shown(place.function, place.file, place.line)
    return f" Of the stacks seen there ({while_doing}), {percent(place.share)} are in {where}."


# Profiles of one rank that travel: those that were read first.
MOST_PROFILES = 6

_NO_PROFILE = "no profile of another tool was read"


def _shown(stacks: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the rows of each profile that are shown: of the main thread and loader workers, where these are known."""
    theirs = stacks[stacks["profile"] != ""]
    if theirs.empty:
        raise NotMeasured(_NO_PROFILE)
    found = []
    for name, rows in theirs.groupby("profile", observed=True, sort=False):
        mine = rows[rows["role"].isin(("main", "worker"))]
        found.append((str(name), mine if len(mine) else rows))
    return found[:MOST_PROFILES]


def _frames(stack: str) -> list[str]:
    """Return the frames of a stack without Python's own that import a module, a dozen for each."""
    frames = stack.split(";")
    return [frame for frame in frames if "(<frozen importlib" not in frame] or frames


@per_rank
def profile_flame(stacks: Frame = needs(schema.STACKS)) -> pd.DataFrame:
    """Return the trees of calls: profile, unit, doing, parent (its row of the profile, -1: none), name, own, samples.

    `doing`: the phase of a step in PyTorch, worker, or "" in none of them.
    """
    parts = []
    for name, rows in _shown(stacks):
        doing = [role if role == "worker" else phase for role, phase in zip(rows["role"], rows["phase"], strict=True)]
        seen = zip(doing, map(_frames, rows["stack"]), rows["samples"], strict=True)
        made = tree(seen, int(rows["samples"].sum()))
        parts.append(made.assign(profile=name, unit=str(rows["unit"].iloc[0])))
    return pd.concat(parts, ignore_index=True)


@per_rank
def profile_functions(stacks: Frame = needs(schema.STACKS), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return the functions of each profile: profile, tool, unit, function, file, line, own, alone, total, of.

    `alone`: in the function; in one of the user's also in library code that it had called. `total`: with all that it
    had called. `of`: all of the profile. In its unit, the user's own first, each with the most first. `line`: the one
    with most of `alone`.
    """
    parts = []
    for name, rows in _shown(stacks):
        frame = _most_seen(("", s.split(";"), n) for s, n in zip(rows["stack"], rows["samples"], strict=True))
        frame = frame.drop(columns="doing")
        facts = rank.trace_facts.get(f"profile {name}") or {}
        whole = int(facts.get("total") or rows["samples"].sum())
        parts.append(frame.assign(profile=name, tool=facts.get("tool", ""), unit=str(rows["unit"].iloc[0]), of=whole))
    return pd.concat(parts, ignore_index=True)


# Functions of a deterministic profile that travel.
MOST_COUNTED = 40


@per_rank
def counted_functions(functions: Frame = needs(schema.FUNCTIONS)) -> pd.DataFrame:
    """Return the functions of each profile that took longest by themselves: the table "functions", with `of_ns`.

    `of_ns`: what all functions of the profile took. Raises NotMeasured where none was read.
    """
    if functions.empty:
        raise NotMeasured(_NO_PROFILE)
    whole = functions.groupby("profile", observed=True)["own_ns"].transform("sum")
    rows = functions.assign(of_ns=whole).sort_values("own_ns", ascending=False, kind="stable")
    kept = rows[rows.groupby("profile", observed=True).cumcount() < MOST_COUNTED]
    return kept.astype({"profile": str, "function": str, "file": str}).reset_index(drop=True)


@across_ranks
def profile_summaries(profile_functions: Frame = needs(profile_functions)) -> pd.DataFrame:
    """Return the function of each profile with most of it: name, tool, unit, total, function, file, line, share, own.

    The user's own with most of it, where there is one; `counted`: of a deterministic profiler.
    """
    rows = []
    for name, mine in profile_functions.groupby("profile", sort=False):
        whole = float(mine.groupby("rank")["of"].first().sum())
        by = mine.groupby(["function", "file", "own"], as_index=False).agg({"line": "first", "alone": "sum"})
        by = by.sort_values(["own", "alone"], ascending=False, kind="stable")
        # The top level of a user's module shows only that the script ran.
        named = by[by["own"] & (by["function"] != "<module>") & (by["alone"] > 0)]
        top = (named if len(named) else by.sort_values("alone", ascending=False, kind="stable")).iloc[0]
        tool = str(mine["tool"].iloc[0])
        rows.append(
            {
                "name": str(name),
                "tool": tool,
                "unit": str(mine["unit"].iloc[0]),
                "total": whole,
                **{column: top[column] for column in ("function", "file", "line")},
                "share": float(top["alone"]) / whole if whole else 0.0,
                "own": bool(top["own"]),
                "counted": tool == "cProfile",
            }
        )
    return pd.DataFrame(rows)


_CALL = ["doing", "parent", "name", "samples", "own"]


def flame_rows(
    flame: pd.DataFrame, roots: Mapping[str, str], categories: Mapping[str, str], *, rooted: bool = True
) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of a panel of shape flame: what was done (`roots`: doing → its name), and upon it its functions.

    The widest stand first. `rooted`: whether what was done stands there as a frame.
    """
    seen: Counter[tuple[str, ...]] = Counter()  # by path, which begins with what was done
    own = set()
    for _, of_rank in flame.groupby("rank"):
        paths: list[tuple[str, ...]] = []
        for doing, parent, name, samples, of_user in of_rank[_CALL].itertuples(index=False):
            above = paths[parent] if parent >= 0 else (doing,)
            paths.append((*above, name))
            seen[paths[-1]] += samples
            seen[above] += samples if parent < 0 else 0
            own |= {paths[-1]} if of_user else set()
    place = [*roots].index
    rows: list[tuple[int, int, int, str, str]] = []
    begin: Counter[tuple[str, ...]] = Counter()  # where the next call on each path is drawn
    for path in sorted(seen, key=lambda path: (len(path), place(path[0]), -seen[path])):
        at = begin[path] = begin[path[:-1]]
        begin[path[:-1]] += seen[path]
        function, _, file = path[-1].rpartition(" (")
        name, category = shown(function, file.rstrip(")")), "own" if path in own else "library"
        if len(path) == 1:
            name, category = roots[path[0]], categories[path[0]]
        if rooted or len(path) > 1:
            rows.append((len(path) - 1 - (not rooted), at, seen[path], name, category))
    return tuple(sorted(rows)[:MOST_FRAMES])
