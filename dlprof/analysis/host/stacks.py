"""Which Python functions a rank and its loader workers were seen in, and while the step was doing what."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import pandas as pd

from dlprof.analysis.engine import Maybe, MeasureFailed, per_rank
from dlprof.errors import NotMeasured
from dlprof.units import percent

# What the training thread was doing, and the workers beside it, in words.
COMPUTING = ("forward", "backward", "optimizer")
DOING = {
    "rest": "between the phases",
    **{phase: phase for phase in COMPUTING},
    "fetch": "waiting for the loader",
    "worker": "loader worker",
}

# What travels of each of these: the user's own functions and those of libraries, with the most samples first.
MOST_OWN = 24
MOST_LIBRARY = 8

# What travels of the tree of calls: frames with at least this share of all that was seen, as deep as a screen is high.
LEAST_FRAME = 1 / 250
MOST_FRAMES = 400
MOST_DEPTH = 40

# Frames that only pass a call on.
_PASSED = re.compile(r"(?:\w+\.)*(?:_wrapped_call_impl|_call_impl|decorate_context|wrapper|inner) \(.*torch[/\\]")

# A function is worth naming in a finding from this share of the samples on, and where there are this many: below, a
# share is off by a tenth and more.
NOTABLE_SHARE = 0.2
LEAST_SAMPLES = 25

_FRAME = re.compile(r"(.*) \((.*):(\d+)\)")
_INSTALLED = re.compile(r"^<|[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python[0-9.]+[/\\]")
_PLACE = re.compile(r".*[/\\](?:(?:site|dist)-packages|lib[/\\]python[0-9.]+)[/\\]")

Function = tuple[str, str]  # name, file


@per_rank
def hottest(stacks: pd.DataFrame) -> pd.DataFrame:
    """Return the functions that were seen most: doing, function, file, line, own, alone, total, samples.

    `doing`: what the training thread was doing (fetch, forward, backward, optimizer; rest: none of these), or worker.
    `own`: a file of the user's, not of Python or an installed package. `alone`: samples in the function; in
    one of the user's also those in library code that it had called. `total`: with all that it had called. `line`: the
    one seen most in `alone`. `samples`: all of the doing. Ordered by doing, own first, then by `alone` and `total`.
    """
    table = stacks
    table = table[table["role"].isin(["main", "worker"])]
    if not table["samples"].sum():
        raise NotMeasured("no Python stack of the training thread was seen")
    alone: dict[str, Counter[Function]] = defaultdict(Counter)
    total: dict[str, Counter[Function]] = defaultdict(Counter)
    lines: dict[tuple[str, Function], Counter[int]] = defaultdict(Counter)
    samples: Counter[str] = Counter()
    for role, phase, stack, n in zip(table["role"], table["phase"], table["stack"], table["samples"], strict=True):
        doing = _doing(role, phase)
        frames = [(f[1], f[2], int(f[3])) for f in map(_FRAME.fullmatch, stack.split(";")) if f is not None]
        samples[doing] += n
        for function in {(name, file) for name, file, _ in frames}:
            total[doing][function] += n
        own = next((f for f in reversed(frames) if is_own(f[1])), None)
        for name, file, line in {*frames[-1:], *([own] if own is not None else [])}:
            alone[doing][name, file] += n
            lines[doing, (name, file)][line] += n
    rows = [
        (
            doing,
            *function,
            max(lines[doing, function].items(), key=lambda seen: seen[1], default=(0, 0))[0],
            is_own(function[1]),
            alone[doing][function],
            times,
            samples[doing],
        )
        for doing in DOING
        for function, times in total[doing].items()
    ]
    columns = ["doing", "function", "file", "line", "own", "alone", "total", "samples"]
    frame = pd.DataFrame(rows, columns=columns)
    frame = frame.assign(place=frame["doing"].map([*DOING].index))
    frame = frame.sort_values(
        ["place", "own", "alone", "total", "function"], ascending=[True, False, False, False, True]
    )
    place = frame.groupby(["doing", "own"]).cumcount()
    return frame[place < frame["own"].map({True: MOST_OWN, False: MOST_LIBRARY})][columns].reset_index(drop=True)


@per_rank
def flame(stacks: pd.DataFrame) -> pd.DataFrame:
    """Return the tree of calls: doing, parent (its row, -1: none), name, own, samples; each parent before its children.

    Small frames, and those deeper than a screen shows, are left out: what is missing of a parent was there, or its own.
    """
    table = stacks
    table = table[table["role"].isin(["main", "worker"])]
    least = LEAST_FRAME * float(table["samples"].sum())
    if not least:
        raise NotMeasured("no Python stack of the training thread was seen")
    names: dict[str, str] = {}
    seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for role, phase, stack, n in zip(table["role"], table["phase"], table["stack"], table["samples"], strict=True):
        path: list[str] = []
        for text in stack.split(";"):
            if text not in names:
                names[text] = "" if _PASSED.match(text) else _FRAME.sub(r"\1 (\2)", text)
            if names[text]:
                path.append(names[text])
        doing = _doing(role, phase)
        for depth in range(1, min(len(path), MOST_DEPTH) + 1):
            seen[doing, tuple(path[:depth])] += n
    kept = sorted((key for key, n in seen.most_common(MOST_FRAMES) if n >= least), key=lambda key: len(key[1]))
    place = {key: row for row, key in enumerate(kept)}
    rows = [(doing, place.get((doing, path[:-1]), -1), path[-1], seen[doing, path]) for doing, path in kept]
    frame = pd.DataFrame(rows, columns=["doing", "parent", "name", "samples"])
    files = [name.rpartition(" (")[2].rstrip(")") for name in frame["name"]]
    return frame.assign(own=[is_own(file) for file in files])


def _doing(role: str, phase: str) -> str:
    return "worker" if role == "worker" else phase if phase in DOING else "rest"


def is_own(file: str) -> bool:
    """Return whether a file is the user's: neither Python's nor an installed package's."""
    return _INSTALLED.search(file) is None


def shown(function: str, file: str, line: int) -> str:
    """Name a function as a report does: decode (data.py:41)."""
    name = re.split(r"[/\\]", file)[-1] if is_own(file) else _PLACE.sub("", file)
    return f"{function} ({name}:{line})" if line else f"{function} ({name})"


def hottest_own(hottest: Maybe[pd.DataFrame], rank: int, *doing: str) -> str:
    """Say where a rank was seen most while doing one of these: "71 % are in decode (data.py:41)"; "" for nowhere.

    Of the user's own functions.
    """
    try:
        frame = hottest.get()
    except (NotMeasured, MeasureFailed):
        return ""
    seen = frame[(frame["rank"] == rank) & frame["doing"].isin(doing)]
    samples = int(seen.drop_duplicates("doing")["samples"].sum())
    mine = seen[seen["own"].astype(bool) & (seen["function"] != "<module>")]
    if samples < LEAST_SAMPLES or not len(mine):
        return ""
    alone = mine.groupby(["function", "file"])["alone"].transform("sum")
    top = mine.iloc[int(alone.to_numpy().argmax())]
    share = float(alone.max()) / samples
    if share < NOTABLE_SHARE:
        return ""
    return f"{percent(share)} are in {shown(str(top['function']), str(top['file']), int(top['line']))}"
