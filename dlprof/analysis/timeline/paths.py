"""Paths of modules, and repeated layers as one: `encoder.layer.*` for twelve layers that are built alike."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from itertools import takewhile
from typing import NamedTuple

# The fewest modules without children that are folded: two convolutions of a block are two layers.
FEWEST_LEAVES = 4

MOST_RANGES = 3  # of indices that a name lists

_INSTANCE = re.compile(r"(.+)_(\d+)")  # Conv2d_3, as torch.profiler names modules with their class
_BLOCK = re.compile(r"(.*\D)(\d+)")  # block3

# What may be in one of these says nothing of what is in another: layer1 to layer4 of a ResNet are its stages.
_CONTAINERS = frozenset(("", "Sequential", "ModuleList", "ModuleDict"))


class _Child(NamedTuple):
    path: str
    stem: str  # its name without its number
    place: int | None  # among those of its stem in one module
    number: int | None


def parent(path: str) -> str:
    """Return the path of the module around one; "" of an outermost one."""
    return path.rpartition(".")[0]


def around(paths: Iterable[str]) -> str:
    """Return the innermost module around all of these; "" is the model itself."""
    parts = [path.split(".") for path in paths]
    return ".".join(names[0] for names in takewhile(lambda n: len(set(n)) == 1, zip(*parts, strict=False)))


def folded(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the folded path of each module, given the class of each by its path.

    "" is the model itself. Modules fold that have the same parent, names that differ in an index alone (`layer.0` and
    `layer.1`, `Linear_0` and `Linear_1`, or `block0` and `block1`), the same class, and children of the same names and
    classes; so do their children, each with those of the same name. The index becomes `*` where all that have one fold,
    else `{1-3,5}`. Modules without children fold where there are FEWEST_LEAVES side by side or more; `conv1` and
    `conv2` never do, nor Sequentials that are not in one, as the stages of a ResNet.
    """
    children: dict[str, dict[str, str]] = {}  # parent → name → path
    placed: set[str] = set()
    for path in kinds:
        while path and path not in placed:
            placed.add(path)
            children.setdefault(parent(path), {})[path.rpartition(".")[2]] = path
            path = parent(path)
    names = {
        path: _stem(name, kinds.get(path, ""), path in children)
        for of in children.values()
        for name, path in of.items()
    }
    alike = _alike(kinds, children, names)
    found = {"": ""} if "" in kinds else {}
    todo: list[tuple[str, list[str]]] = [("", [""])]
    while todo:
        label, members = todo.pop()
        mine = [child for member in members for child in _numbered(children.get(member, {}).values(), names)]
        for name, paths in _named(mine, alike, children):
            whole = f"{label}.{name}" if label else name
            found.update((path, whole) for path in paths if path in kinds)
            todo.append((whole, paths))
    return found


def _alike(
    kinds: Mapping[str, str], children: Mapping[str, Mapping[str, str]], names: Mapping[str, tuple[str, int | None]]
) -> dict[str, int]:
    """Return a number for each path, the same for modules of one class whose children have the same names and numbers.

    How many children with an index there are does not count: of a layer's experts those are seen that were called.
    """
    numbers: dict[Hashable, int] = {}
    alike: dict[str, int] = {}
    order = [""]
    for path in order:
        order += children.get(path, {}).values()
    for path in reversed(order):
        below = frozenset((names[p][0], alike[p]) for p in children.get(path, {}).values())
        alike[path] = numbers.setdefault((kinds.get(path, ""), below), len(numbers))
    return alike


def _stem(name: str, kind: str, has_children: bool) -> tuple[str, int | None]:
    """Return a name without its index, and the index: ("", 3) of "3", ("block", 3) of "block3"; None: it has none."""
    if name.isdecimal():
        return "", int(name)
    found = _INSTANCE.fullmatch(name)
    if found and found[1] == kind.rpartition(".")[2]:
        return (f"{found[1]}_", int(found[2])) if kind not in _CONTAINERS else (name, None)
    found = _BLOCK.fullmatch(name) if has_children and kind not in _CONTAINERS else None
    return (found[1], int(found[2])) if found else (name, None)


def _numbered(paths: Iterable[str], names: Mapping[str, tuple[str, int | None]]) -> Iterable[_Child]:
    """Return the children of one module, each with its stem, its place among those of one stem, and its index.

    The place is the index itself, but where the index counts all modules of a class: the first Linear of one layer is
    the first of the other, too.
    """
    places: dict[str, int] = {}
    for path in paths:
        stem, index = names[path]
        place = index
        if stem and index is not None:
            place = places[stem] = places.get(stem, -1) + 1
        yield _Child(path, stem, place, index)


def _named(
    mine: Iterable[_Child], alike: Mapping[str, int], children: Mapping[str, Mapping[str, str]]
) -> Iterable[tuple[str, list[str]]]:
    """Yield the children of modules that are alike, each with its name and all paths that it stands for."""
    stems: dict[str, dict[int, dict[int | None, list[_Child]]]] = {}  # stem → number → place
    for child in mine:
        stems.setdefault(child.stem, {}).setdefault(alike[child.path], {}).setdefault(child.place, []).append(child)
    for stem, groups in stems.items():
        every = {child.number for group in groups.values() for each in group.values() for child in each}
        for group in groups.values():
            has_children = any(children.get(child.path) for each in group.values() for child in each)
            for places in _together(group, has_children):
                found = [child for place in places for child in group[place]]
                indices = sorted({child.number for child in found if child.number is not None})
                yield stem + _written(indices, len(indices) == len(every)), [child.path for child in found]


def _together(group: Iterable[int | None], has_children: bool) -> list[list[int | None]]:
    """Return which of the places of modules that are alike fold into one."""
    places = sorted(place for place in group if place is not None)
    if not places:
        return [[None]]
    if has_children:
        return [list(places)]
    runs: list[list[int | None]] = []
    for run in _runs(places):
        runs += [list(run)] if len(run) >= FEWEST_LEAVES else [[place] for place in run]
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


def _written(indices: list[int], all_of_them: bool) -> str:
    if len(indices) < 2:
        return str(indices[0]) if indices else ""
    if all_of_them:
        return "*"
    runs = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in _runs(indices)]
    return "{" + ",".join([*runs[:MOST_RANGES], *(["…"] if len(runs) > MOST_RANGES else [])]) + "}"
