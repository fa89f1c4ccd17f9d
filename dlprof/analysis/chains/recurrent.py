"""Recurrent networks that are written out: the same cell again and again, a product, gates, elementwise operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.chains.calls import Calls, Chain, calls, replaced
from dlprof.analysis.engine import RANK, RankFacts, needs, per_rank, within_rank
from dlprof.analysis.timeline.device import LEAST_KERNEL_NS
from dlprof.analysis.timeline.what_if import GRAPH_GAP_NS
from dlprof.errors import NotMeasured

LSTM, GRU, RNN, CELLS = "LSTM", "GRU", "RNN", "cells in a loop"

# The same few operators at least so many times in a row: no network has as many layers of one kind with gates.
_TURNS = 16
_WRITTEN = re.compile(rf"([1axbu78k]{{3,40}}?)\1{{{_TURNS - 1},}}")
_CELLS = re.compile(rf"9{{{_TURNS},}}")

# cuDNN computes a time step of a layer in two kernels at least: a product with the state, and all of its gates.
_KERNELS = 2


@within_rank
def recurrent_chains(calls: Calls = needs(calls), rank: RankFacts = needs(RANK)) -> list[Chain]:
    """Return the written-out recurrent networks; raise NotMeasured where it is not known how many parameters there are.

    Layers are not a recurrence: a network of as many layers has as many parameters as products, at least.
    """
    found = list(_chains(calls))
    if not found:
        return []
    parameters = sum(int(o.get("parameters") or 0) for o in rank.facts.get("optimizers") or [])
    if not parameters:
        raise NotMeasured("how many parameters the model has was not recorded (record with `dlprof wrap`)")
    return [one for one, products in found if parameters < products]


@per_rank
def recurrent_loops(
    recurrent_chains: list[Chain] = needs(recurrent_chains),
    replaced: Callable[[Sequence[Chain]], pd.DataFrame] = needs(replaced),
) -> pd.DataFrame:
    """Return the time of written-out recurrent networks, as `work.replaced` does; a fix leaves two kernels a turn."""
    return replaced(recurrent_chains)


def _chains(calls: Calls) -> Iterator[tuple[Chain, int]]:
    """Yield each chain with how many products, or cells, its forward pass has."""
    # What launched nothing belongs to the step of what comes before it.
    step = pd.Series(calls.step).where(calls.step >= 0).ffill().fillna(-1).to_numpy()
    for pattern in (_WRITTEN, _CELLS):
        found = [pair for first, last in calls.find(pattern) for pair in _by_step(step, first, last)]
        for first, last in found:
            text = calls.text[first:last]
            products = text.count("1") + text.count("9")
            form, turns = _form(text)
            if not turns:
                continue
            least_ns = turns * _KERNELS * (LEAST_KERNEL_NS + GRAPH_GAP_NS)
            passes = {"forward": np.arange(first, last), "backward": calls.made(first, last)}
            for name, places in passes.items():
                if took := calls.took(places):
                    yield Chain(form, name, places, min(least_ns / took, 1.0), launching=0.0), products


def _by_step(step: NDArray[np.float64], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Divide the places from a first to a last (exclusive) where another step begins."""
    edges = first + 1 + np.flatnonzero(np.diff(step[first:last]))
    return pairwise([first, *edges.tolist(), last])


def _form(text: str) -> tuple[str, int]:
    """Return what a text of operators computes, and how many time steps of it; "" and 0: nothing recurrent."""
    body = re.fullmatch(r"(.+?)\1*", text)
    turns = len(text) // len(body[1]) if body else 0
    if body is None or turns < _TURNS:
        return "", 0
    products, sigmoids, tanhs, cells = (body[1].count(letter) for letter in "1789")
    if cells:
        return CELLS, turns
    if not products or not tanhs:
        return "", 0
    return (LSTM if tanhs > 1 and sigmoids else GRU if sigmoids else RNN), turns
