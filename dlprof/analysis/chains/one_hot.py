"""Products with one-hot rows, which select rows of a matrix: an embedding does that without a product."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis.chains.calls import Calls, Chain, calls, replaced
from dlprof.analysis.compute.products import operands, sizes
from dlprof.analysis.engine import RANK, Frame, RankFacts, needs, per_rank, within_rank

ONE_HOT, GRADIENT = "one_hot and a product", "the product's gradient"

_CHAIN = re.compile(r"ht*1")

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@within_rank
def one_hot_chains(
    calls: Calls = needs(calls), spans: Frame = needs(schema.SPANS), rank: RankFacts = needs(RANK)
) -> list[Chain]:
    """Return products with one-hot rows, and their gradients."""
    return list(_chains(calls, spans, rank.facts))


@per_rank
def one_hots(
    one_hot_chains: list[Chain] = needs(one_hot_chains),
    replaced: Callable[[Sequence[Chain]], pd.DataFrame] = needs(replaced),
) -> pd.DataFrame:
    """Return products with one-hot rows, and their gradients, as `work.replaced` does.

    An embedding takes at most the product's time × the share of bytes that it moves: N rows of h read and written, of
    the N × V, V × h and N × h that the product moves; in the backward pass also the whole matrix. Where shapes are not
    known, all of the product's time stays.
    """
    return replaced(one_hot_chains)


def _chains(calls: Calls, spans: pd.DataFrame, facts: Mapping[str, Any]) -> Iterator[Chain]:
    for first, last in calls.find(_CHAIN):
        places = np.arange(first, last)
        shape = _shape(calls, spans, last - 1) or _counted(facts)
        forward, backward = _shares(*shape) if shape else (1.0, 1.0)
        whole = calls.took(places)
        yield Chain(ONE_HOT, "forward", places, forward * calls.took(places[-1:]) / whole if whole else 1.0)
        if shape and len(made := calls.made(last - 1, last)):
            yield Chain(GRADIENT, "backward", made, backward)


def _shares(rows: int, words: int, width: int) -> tuple[float, float]:
    moved = rows * words + words * width + rows * width
    return min(2 * rows * width / moved, 1.0), min(2 * (rows + words) * width / moved, 1.0)


def _shape(calls: Calls, spans: pd.DataFrame, place: int) -> tuple[int, int, int] | None:
    """Return N, V and h of a traced product of N × V one-hot rows; None where its shapes were not traced."""
    row, end, shapes = int(calls.rows[place]), int(calls.end[place]), spans["shape"].array
    start, lane = spans["start_ns"].to_numpy(), spans["lane"].cat.codes.to_numpy()
    while row < len(spans) and start[row] < end:
        if lane[row] == calls.lane[place] and shapes[row] and len(sizes(shapes[row])) > 1:
            return _of(str(spans["name"].array[row]), str(shapes[row]))
        row += 1
    return None


def _of(operator: str, shape: str) -> tuple[int, int, int] | None:
    left, right = operands(operator, shape)
    return (left[-2], left[-1], right[-1]) if min(len(left), len(right)) > 1 and left[-1] == right[-2] else None


def _counted(facts: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return the same from the step whose FLOPs were counted, which has the sizes of one-hot tensors."""
    counted = facts.get("flops") or {}
    made = {(int(one["values"]), int(one["classes"])) for one in counted.get("one_hot") or []}
    for row in counted.get("shapes") or []:
        if row.get("operator") in _PRODUCTS and row.get("shape"):
            found = _of(str(row["operator"]), str(row["shape"]))
            batch = np.prod(operands(str(row["operator"]), str(row["shape"]))[0][:-2], dtype=np.int64)
            if found and (int(batch) * found[0] * found[1], found[1]) in made:
                return found
    return None
