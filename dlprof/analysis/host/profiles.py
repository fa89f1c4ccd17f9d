"""What the profiles of other tools show: the tree of calls, and the functions with most of the time.

Flame graphs of a tree of calls, over all ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlprof import schema
from dlprof.analysis.engine import RANK, Frame, RankFacts, across_ranks, needs, per_rank
from dlprof.analysis.host.stacks import MOST_FRAMES, MOST_LIBRARY, MOST_OWN, frames_of, is_own, shown, tree
from dlprof.errors import NotMeasured

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
        lines: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        total: Counter[tuple[str, str]] = Counter()
        for stack, n in zip(rows["stack"], rows["samples"], strict=True):
            frames = frames_of(stack)
            total.update(dict.fromkeys({(function, file) for function, file, _ in frames}, n))
            own = [frame for frame in frames if is_own(frame[1])]
            for function, file, line in {*frames[-1:], *own[-1:]}:
                lines[function, file][line] += n
        facts = rank.trace_facts.get(f"profile {name}") or {}
        found = [
            (*key, lines[key].most_common(1)[0][0] if key in lines else 0, is_own(key[1]), lines[key].total(), n)
            for key, n in total.items()
        ]
        frame = pd.DataFrame(found, columns=["function", "file", "line", "own", "alone", "total"])
        frame = frame.sort_values(["own", "alone", "total", "function"], ascending=[False, False, False, True])
        nth = frame.groupby("own").cumcount()
        frame = frame[nth < frame["own"].map({True: MOST_OWN, False: MOST_LIBRARY})]
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
