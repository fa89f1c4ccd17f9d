"""Paths of modules, and repeated layers as one: `encoder.layer.*` for twelve layers that are built alike."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping

# So many modules without children of their own stand for themselves: two convolutions of a block are two layers.
FEWEST_LEAVES = 4

MOST_RANGES = 3  # of indices that a name lists

_INSTANCE = re.compile(r"(.+)_(\d+)")  # Conv2d_3, as torch.profiler names modules with their class


def parent(path: str) -> str:
    """Return the path of the module around one; "" of an outermost one."""
    return path.rpartition(".")[0]


def folded(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the folded path of each module, given the class of each by its path.

    "" is the model itself. Modules fold that have the same parent, names that differ in an index alone (`layer.0` and
    `layer.1`, or `Linear_0` and `Linear_1`), the same class, and children of the same names and classes; so do their
    children, each with those of the same name. The index becomes `*` where all that have one fold, else `{1-3,5}`.
    Modules without children fold where there are FEWEST_LEAVES side by side or more.
    """
    children: dict[str, dict[str, str]] = {}  # parent → name → path
    placed: set[str] = set()
    for path in kinds:
        while path and path not in placed:
            placed.add(path)
            children.setdefault(parent(path), {})[path.rpartition(".")[2]] = path
            path = parent(path)
    alike = _alike(kinds, children)
    found = {"": ""} if "" in kinds else {}
    todo: list[tuple[str, list[str]]] = [("", [""])]
    while todo:
        label, members = todo.pop()
        mine = [(name, path) for member in members for name, path in children.get(member, {}).items()]
        for name, paths in _named(mine, kinds, alike, children):
            whole = f"{label}.{name}" if label else name
            found.update((path, whole) for path in paths if path in kinds)
            todo.append((whole, paths))
    return found


def _alike(kinds: Mapping[str, str], children: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    """Return a number for each path, the same for modules of one class whose children have the same names and numbers.

    How many children with an index there are does not count: of a layer's experts those are seen that were called.
    """
    numbers: dict[Hashable, int] = {}
    alike: dict[str, int] = {}
    order = [""]
    for path in order:
        order += children.get(path, {}).values()
    for path in reversed(order):
        below = frozenset((_stem(n, kinds, p)[0], alike[p]) for n, p in children.get(path, {}).items())
        alike[path] = numbers.setdefault((kinds.get(path, ""), below), len(numbers))
    return alike


def _stem(name: str, kinds: Mapping[str, str], path: str) -> tuple[str, int | None]:
    """Return a name without its index, and the index: ("", 3) of "3", ("Conv2d_", 3) of a Conv2d named "Conv2d_3"."""
    if name.isdecimal():
        return "", int(name)
    found = _INSTANCE.fullmatch(name)
    if found and found[1] == kinds.get(path, "").rpartition(".")[2]:
        return f"{found[1]}_", int(found[2])
    return name, None


def _named(
    mine: Iterable[tuple[str, str]],
    kinds: Mapping[str, str],
    alike: Mapping[str, int],
    children: Mapping[str, Mapping[str, str]],
) -> Iterable[tuple[str, list[str]]]:
    """Yield the children of modules that are alike, each with its name and all paths that it stands for."""
    stems: dict[str, dict[int, dict[int | None, list[str]]]] = {}  # stem → number → index → paths
    for name, path in mine:
        stem, index = _stem(name, kinds, path)
        stems.setdefault(stem, {}).setdefault(alike[path], {}).setdefault(index, []).append(path)
    for stem, groups in stems.items():
        every = {index for group in groups.values() for index in group}
        for group in groups.values():
            has_children = any(children.get(path) for paths in group.values() for path in paths)
            for indices in _together(group, has_children):
                paths = [path for index in indices for path in group[index]]
                yield stem + _written(indices, len(indices) == len(every)), paths


def _together(group: Iterable[int | None], has_children: bool) -> list[list[int | None]]:
    """Return which of the indices of modules that are alike fold into one."""
    indices = sorted(index for index in group if index is not None)
    if not indices:
        return [[None]]
    if has_children:
        return [list(indices)]
    runs: list[list[int | None]] = []
    for run in _runs(indices):
        runs += [list(run)] if len(run) >= FEWEST_LEAVES else [[index] for index in run]
    return runs


def _runs(indices: Iterable[int]) -> list[list[int]]:
    """Return ascending numbers as runs without gaps."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _written(indices: list[int | None], all_of_them: bool) -> str:
    known = [index for index in indices if index is not None]
    if len(known) < 2:
        return str(known[0]) if known else ""
    if all_of_them:
        return "*"
    runs = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in _runs(known)]
    return "{" + ",".join([*runs[:MOST_RANGES], *(["…"] if len(runs) > MOST_RANGES else [])]) + "}"
