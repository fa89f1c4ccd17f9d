"""The places of a backward pass: what the forward pass saves, in its order, and what is made where that is used."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import pandas as pd
from numpy.typing import NDArray

_MOST_SHARED = 1_000  # parameters of several modules that are looked at: more than any model is known to have

WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def places_of(held: pd.DataFrame) -> pd.DataFrame:
    """Return the places of a footprint: what is saved, in the order of the forward pass; one, if nothing is."""
    saved = held[held["part"] == "activation"].reset_index(drop=True)
    if not len(saved):
        saved = pd.DataFrame({"module": [""], "kind": "", "dtype": "", "tensors": 0, "bytes": 0})
    registered = held.loc[held["part"] == "parameter", "module"].astype(str).drop_duplicates()
    steps = saved["module"].astype(str).map({m: at for at, m in enumerate(registered)}).dropna().diff()
    if (steps < 0).sum() > (steps > 0).sum():  # older recordings have it in the order of the backward pass
        saved = saved[::-1].reset_index(drop=True)
    tensor = saved["bytes"] / saved["tensors"].clip(lower=1)
    texts = saved[["module", "kind", "dtype"]].astype(str)
    frame = texts.assign(
        unit="",
        tensor=tensor.astype(float),
        kept=saved["bytes"].astype(float),
        again=0.0,
        flowing=(2.0 * tensor).where(texts["dtype"].isin(WIDTH), 0.0),
    )
    gradients = held[held["part"] == "gradient"]
    gradient = at_places(held, frame["module"], gradients)
    own = gradient.copy()
    where, last = _where(held, frame["module"]), {name: at for at, name in enumerate(frame["module"])}
    for _, shared in held[held["part"] == "shared"].head(_MOST_SHARED).iterrows():
        # A parameter of two modules has a gradient once the later one has run backward. That of the other is made
        # beside it, and then added.
        whole = gradients[gradients["full_bytes"] >= shared["full_bytes"]].sort_values("full_bytes").head(1)
        for row in whole.itertuples():
            first, later = where.get(str(row.module), 0), last.get(str(shared["module"]), 0)
            if first < later:
                size = row.bytes * shared["full_bytes"] / max(row.full_bytes, 1)
                gradient[later] += size
                own[later] += size
                gradient[first] -= size
    return frame.assign(gradient=gradient, own=own, cast=at_places(held, frame["module"], held[held["part"] == "cast"]))


def at_places(held: pd.DataFrame, places: pd.Series, rows: pd.DataFrame) -> NDArray[np.float64]:
    """Return the bytes of rows at each place: where their module saves something first, else where the next parameters
    do; spread evenly where no module that has any saves something.
    """
    made = np.zeros(len(places))
    where = _where(held, places)
    sizes = rows.groupby(rows["module"].astype(str))["bytes"].sum()
    np.add.at(made, [where.get(str(name), 0) for name in sizes.index], sizes.to_numpy(dtype=float))
    return made


def _where(held: pd.DataFrame, places: pd.Series) -> dict[str, int]:
    """Return the place at which the backward pass of each module with parameters ends."""
    first = {str(name): at for at, name in reversed(list(enumerate(places)))}
    order = held.loc[held["part"] == "parameter", "module"].astype(str).drop_duplicates()
    at = order.map(first)
    spread = pd.Series(np.linspace(0, len(places) - 1, len(order)), order.index)
    at = at.bfill().ffill() if at.notna().any() else spread
    return dict(zip(order, at.round().astype(int), strict=True))


def corners(grows: NDArray[np.float64], stays: NDArray[np.float64]) -> list[int]:
    """Return the places, in order, where a·grows + b·stays may be at its most for positive a and b.

    The upper right of their convex hull (Andrew 1979).
    """
    order = np.lexsort((-stays, -grows))
    best = np.maximum.accumulate(np.concatenate(([-inf], stays[order][:-1])))
    chain: list[int] = []
    for at in order[stays[order] > best].tolist():
        while len(chain) > 1 and _turns(grows, stays, chain[-2], chain[-1], at) <= 0:
            chain.pop()
        chain.append(at)
    return sorted(chain)


def _turns(x: NDArray[np.float64], y: NDArray[np.float64], a: int, b: int, c: int) -> float:
    return float((x[b] - x[a]) * (y[c] - y[a]) - (y[b] - y[a]) * (x[c] - x[a]))


def units(held: pd.DataFrame) -> list[str]:
    """Return the modules that repeat, as a transformer's layers do: the outermost lists of alike modules.

    By path: what is numbered ("layers.0", "layers.1") and holds most of the activations, else most of the parameters.
    """
    paths = held["module"].astype(str)
    numbered = paths.str.extract(r"^(.+?)\.(\d+)(?:\.|$)")
    found = pd.DataFrame({"list": numbered[0], "place": numbered[1], "part": held["part"], "bytes": held["bytes"]})
    found = found.dropna(subset=["list"])
    if not len(found):
        return []
    sizes = found[found["part"] == "activation"].groupby("list")["bytes"].sum()
    if not sizes.sum():
        sizes = found.groupby("list")["bytes"].sum()
    chosen = sizes[sizes >= sizes.sum() / 20].index
    kept = found[found["list"].isin(chosen)].drop_duplicates(["list", "place"])
    return [f"{name}.{place}" for name, place in zip(kept["list"], kept["place"], strict=True)]


def with_modules_inside(held: pd.DataFrame, modules: Sequence[str]) -> list[str]:
    """Return those of some modules that have modules inside: a checkpoint around a single layer saves next to nothing,
    as the layer keeps little more than its input.
    """
    paths = held["module"].astype(str).unique()
    around = dict(zip(paths, unit_of(pd.Series(paths), modules), strict=True))
    outer = {unit for path, unit in around.items() if path != unit}
    return [module for module in modules if module in outer]


def largest_unit(held: pd.DataFrame, modules: Sequence[str]) -> float:
    """Return the bytes of the parameters of the largest module, or of what lies in none of them."""
    parameters = held[held["part"] == "parameter"]
    sizes = parameters["full_bytes"].groupby(unit_of(parameters["module"], modules).to_numpy()).sum()
    return float(sizes.max()) if len(sizes) else 0.0


def unit_of(paths: pd.Series, modules: Sequence[str]) -> pd.Series:
    """Return of each path the one of these modules that it is, or lies in; "": none."""
    known = frozenset(modules)

    def around(path: str) -> str:
        while path and path not in known:
            path = path.rpartition(".")[0]
        return path

    text = paths.astype(str)
    return text.map({path: around(path) for path in text.unique()})
