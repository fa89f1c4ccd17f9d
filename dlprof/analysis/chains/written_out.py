"""What is written out by separate operators, or copied, where one PyTorch operator does it: GELU, cross entropy,
normalisation, tensors that grow by `cat`, products with one-hot rows, recurrent networks.

Each kind has two measures: its chains, which `source/where.py` finds lines for, and their time, with the columns of
`calls.replaced`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.chains.calls import Calls, Chain, Replaced, calls, chains, replaced
from dlprof.analysis.compute.products import operands, sizes
from dlprof.analysis.engine import RANK, Frame, RankFacts, needs, per_rank, within_rank
from dlprof.analysis.timeline.device import LEAST_KERNEL_NS, has_device
from dlprof.analysis.timeline.what_if import GRAPH_GAP_NS
from dlprof.errors import NotMeasured

# ---- GELU, as GPT's and BERT's first code has it

TANH, ERF = "tanh", "erf"

# Half of x times 1 + tanh of a polynomial: x + 0.044715 x³, or 1 + 0.044715 x² times x; or times 1 + erf of x ÷ √2.
_GELUS = {TANH: re.compile(r"[xk][xpa]{3,6}8ax"), ERF: re.compile(r"(?:[xk]@axx|x?[xk]@ax)")}

# The share of the time that one kernel takes, forward and backward, by the values read and written per input value: 2
# and 3, by separate operators 18 and about 30 (with erf: 11 and about 20).
_GELU_ON_DEVICE = {TANH: (0.11, 0.10), ERF: (0.18, 0.15)}
# On a CPU measured with torch 2.13, of 512 × 512 to 4,096 × 3,072 values: 0.19 to 0.37 and 0.20 to 0.57, with erf 0.15
# to 0.25 and 0.15 to 0.19.
_GELU_ON_CPU = {TANH: (0.33, 0.38), ERF: (0.20, 0.18)}


@within_rank
def gelu_chains(calls: Calls = needs(calls), has_device: bool = needs(has_device)) -> list[Chain]:
    """Return the chains of operators that compute GELU."""
    return [
        chain
        for form, pattern in _GELUS.items()
        for first, last in calls.find(pattern)
        for chain in chains(calls, form, first, last, (_GELU_ON_DEVICE if has_device else _GELU_ON_CPU)[form])
    ]


@per_rank
def gelus(gelu_chains: list[Chain] = needs(gelu_chains), replaced: Replaced = needs(replaced)) -> pd.DataFrame:
    """Return GELU by separate operators, with the columns of `calls.replaced`; `form`: TANH or ERF."""
    return replaced(gelu_chains)


# ---- cross entropies by separate operators, or from a float32 copy of 16-bit logits
#
# `log_softmax` and `nll_loss` are what PyTorch's own consists of, so nothing is saved there. Nor with `log_softmax` and
# `gather`: its gradient is written as often (0.9 to 1.0 of the time from 1,000 classes on, measured on a CPU).

LOG, HOT_TARGETS, SUM, SHIFTED, EXP, COPY = (
    "the log of a softmax",
    "one-hot targets",
    "logsumexp minus the target's logit",
    "logits less their largest, less the log of their exps' sum",
    "exp divided by its sum",
    "a float32 copy of the logits",
)

# By form: its operators, and the share of forward and backward that PyTorch's own cross entropy takes. Measured on a
# CPU with torch 2.13, from 32 × 10 to 1,024 × 32,000 logits, forward and backward together: 0.40 to 0.60, 0.37 to 0.48
# (of a log of a softmax 0.20 to 0.33), 0.29 to 0.53, 0.30 to 0.33, 0.25 to 0.46. By what is read and written of each
# logit, of which its own needs 6: 11, 16, 16, 27 and about 20.
_LOSSES = {
    LOG: (re.compile(r"ft*[aj]?gt*u?[in]"), 0.5),
    # One-hot targets, or scattered ones, before or after the logarithms, smoothed or not.
    HOT_TARGETS: (
        re.compile(r"h[txakju]*(?:l|f[aj]?g)u?xu?[sm]|(?:l|fh?[txa]*[aj]?g)h[txak]*u?xu?[sm]"),
        0.4,
    ),
    SUM: (re.compile(r"(?:yi|iy)b|(?<!b)e{1,2}sg(?:ib|bi)|ie{1,2}sgb"), 0.4),
    SHIFTED: (re.compile(r"t*0b(?:t*e{1,2}sg(?:bi|ib)|ie{1,2}sgb)"), 0.3),
    EXP: (re.compile(r"e{1,2}skt*(?:gt*u?i|ig?)"), 0.35),
}
# On a device a cast reads 2 bytes and writes 4 of each logit, and all that follows moves 4: 36 bytes forward and
# backward. Cross entropy of the 16-bit logits themselves moves 12; code that torch.compile makes of all, 8.
_COPIED, _COPIED_LEFT = re.compile(r"t*(?:c|l[in])"), 0.33
# The gradient's cast moves half as much as the softmax's gradient; the cast of a narrower tensor would take less.
_GRADIENT_AS_WIDE = 0.2


@within_rank
def loss_chains(calls: Calls = needs(calls), has_device: bool = needs(has_device)) -> list[Chain]:
    """Return the chains of operators that compute a loss."""
    written_out = (
        chain
        for form, (pattern, left) in _LOSSES.items()
        for first, last in calls.find(pattern)
        for chain in chains(calls, form, first, last, (left, left))
    )
    return [*written_out, *(_copied(calls) if has_device else ())]


@per_rank
def losses(loss_chains: list[Chain] = needs(loss_chains), replaced: Replaced = needs(replaced)) -> pd.DataFrame:
    """Return losses that move their logits more often than cross entropy, with the columns of `calls.replaced`."""
    return replaced(loss_chains)


def _copied(calls: Calls) -> Iterator[Chain]:
    """Yield losses whose logits are cast first, by the script or by autocast: their gradients are cast back."""
    for first, last in calls.find(_COPIED):
        softmax = next((n for n in calls.made(first, last).tolist() if calls.text[n] == "L"), None)
        if softmax is None or calls.text[softmax + 1 : softmax + 2] != "T":
            continue
        if float(calls.ns[softmax + 1]) >= _GRADIENT_AS_WIDE * float(calls.ns[softmax]) > 0:
            yield Chain(COPY, "forward", np.arange(first, last), _COPIED_LEFT)
            back = np.union1d(calls.made(first, last), [softmax + 1])
            yield Chain(COPY, "backward", back, _COPIED_LEFT)


# ---- normalisation: mean, variance, square root, multiply and add

LAYER, RMS = "mean and variance", "mean of squares"

# x.to(float32), x², its mean, + eps, 1 ÷ root, x times it, back, times the weight (Gemma: 1 + weight). Without eps it
# is the root of a mean, as in error measures; of a difference it is a deviation.
_RMS = re.compile(r"(?<![bt])t*[px](?:m|sk)a(?:r|qz?|p)t*[xk]t*(?:a?xt*)?")
# The mean, what lies between it and the root of the variance, and up to three factors with a sum behind each: the
# deviation over the root, the weight, the bias. torch.std is variance and root.
_LAYER = re.compile(r"t*(?:(?:[mvw]|sk)(?:[abpxmvt]|sk){0,6}(?:[qrd]|(?<=a)p)|d)[abmzt]{0,4}(?:[xk]a?t?){1,3}")

# The share of the time that one kernel takes, forward and backward, by the values read and written per input value.
# A LayerNorm kernel moves 2 forward and 5 backward, with its weights' gradients; separate operators 10 to 14 and about
# 34, for RMSNorm 7 and 23. With casts half of RMSNorm's are twice as wide: 38 and 92 bytes instead of 4 and 10.
_NORM_ON_DEVICE = {LAYER: (0.17, 0.15), RMS: (0.28, 0.22)}
_WITH_CASTS = (0.11, 0.11)
# On a CPU measured with torch 2.13, from 16 × 64 values to 8,192 × 2,048: 0.06 to 0.23 of three ways to write a
# LayerNorm, forward and backward. Its RMSNorm is a chain of the same operators, and as slow (0.85 to 1.18).
_NORM_ON_CPU = {LAYER: (0.15, 0.15)}

# A factor that is as wide as what the statistics are of takes no less than this share of the first operator's time:
# that of a single number, as of a loss, does.
_FACTOR_AS_WIDE = 0.25


@within_rank
def norm_chains(calls: Calls = needs(calls), has_device: bool = needs(has_device)) -> list[Chain]:
    """Return the chains of operators that normalise."""
    found: list[Chain] = []
    for form, pattern in ((RMS, _RMS), (LAYER, _LAYER)):
        if not has_device and form not in _NORM_ON_CPU:
            continue
        alike: dict[str, list[int]] = {}
        for first, last in calls.find(pattern):
            alike.setdefault(calls.text[first:last], []).append(first)
        for text, places in alike.items():
            for first in places if _is_norm(calls, form, text, places) else ():
                last = first + len(text)
                found += chains(calls, form, first, last, _left(calls, form, first, last, has_device))
    return found


@per_rank
def norms(norm_chains: list[Chain] = needs(norm_chains), replaced: Replaced = needs(replaced)) -> pd.DataFrame:
    """Return normalisations by separate operators, with the columns of `calls.replaced`; `form`: LAYER or RMS."""
    return replaced(norm_chains)


def _is_norm(calls: Calls, form: str, text: str, places: Sequence[int]) -> bool:
    """Return whether chains of one text normalise, by the median of their times: single calls may be delayed."""
    if form == LAYER and "b" not in text:
        return False
    root = max(text.rfind(letter) for letter in "qrd")
    root = text.rfind("p") if root < 0 else root
    factor = next((n for n in range(root + 1, len(text)) if text[n] in "xk"), None)
    if factor is None:
        return False
    start = next(n for n, letter in enumerate(text) if letter != "t")
    at = np.array(places)
    at = at[calls.step[at + start] >= 0]
    return bool(len(at) and np.median(calls.ns[at + factor]) >= _FACTOR_AS_WIDE * np.median(calls.ns[at + start]))


def _left(calls: Calls, form: str, first: int, last: int, has_device: bool) -> tuple[float, float]:
    """Return the shares that are left of a chain, forward and backward."""
    if not has_device:
        return _NORM_ON_CPU[form]
    casts = any(calls.text[n] == "t" and calls.ns[n] > 0 for n in range(first, last))
    return _WITH_CASTS if casts and form == RMS else _NORM_ON_DEVICE[form]


# ---- tensors that grow by `cat` in a loop: each call copies the whole tensor, so its time rises evenly

_GROWING = "cat in a loop"

_CAT = re.compile("2")

# A loop calls the same operators between one `cat` and the next; up to three tensors may grow in it. With fewer than
# eight calls, rising times may be chance.
LEAST_CALLS = 8
_TENSORS = (1, 2, 3)

# The calls' times rise along the loop (by rank correlation, as anything may delay a single one), and the last third
# takes so many times as long as the first: with n pieces 5 times, apart from the fixed time of a call.
_IN_ORDER, _GROWS = 0.8, 2.0

# From the first third to the last one the operators between two calls gain at most this part of what the calls gain. A
# loop that reads the growing tensor (DenseNet, a cache of keys) needs it: reading takes half of what copying does, and
# more with what is computed of it. Where nothing reads it the operators gain a little too, as the copies empty the
# caches: up to 0.13, measured on a CPU.
_READS = 0.3


@within_rank
def growing_chains(calls: Calls = needs(calls)) -> list[Chain]:
    """Return the calls of `cat` in loops in which a tensor grows."""
    found: list[Chain] = []
    alike: dict[tuple[int, str], list[NDArray[np.int64]]] = {}
    for places in _loops(calls):
        if calls.ns[places].sum() > 0:
            alike.setdefault((len(places), calls.text[places[0] : places[1]]), []).append(places)
    for same in alike.values():
        # The same loop of several steps: the median of each of its calls, since single calls may be delayed.
        for part in _rising(calls, np.stack(same)):
            for places in same:
                for place in places[part].tolist():
                    left = float(place == places[part][-1])
                    found += chains(calls, _GROWING, place, place + 1, (left, left))
    return found


@per_rank
def growing_cats(
    growing_chains: list[Chain] = needs(growing_chains), replaced: Replaced = needs(replaced)
) -> pd.DataFrame:
    """Return the time of growing tensors in loops, as `calls.replaced` does; a fix leaves each loop's last call."""
    return replaced(growing_chains)


def _loops(calls: Calls) -> Iterator[NDArray[np.int64]]:
    """Yield the places of the calls of each tensor that may grow in a loop: the same operators follow each of them."""
    found = np.array([first for first, _ in calls.find(_CAT)], dtype=np.int64)
    for places in np.split(found, np.flatnonzero(np.diff(calls.lane[found])) + 1):
        bodies = [calls.text[a + 1 : b] for a, b in pairwise(places.tolist())]
        at = 0
        while at < len(bodies):
            n, end = max(((n, _same(bodies, at, n)) for n in _TENSORS), key=lambda one: (one[1] - one[0], -one[0]))
            if end - at + 1 < n * LEAST_CALLS:
                at += 1
                continue
            yield from (places[at : end + 1][k::n] for k in range(n))
            at = end + 1


def _same(bodies: Sequence[str], at: int, n: int) -> int:
    """Return how far bodies repeat every n-th time from a place on."""
    end = at + n
    while end < len(bodies) and bodies[end] == bodies[end - n]:
        end += 1
    return min(end, len(bodies))


def _rising(calls: Calls, loops: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the calls of identical loops (a row each) whose time rises evenly while the time between them does not."""
    others = np.append(0.0, np.cumsum(np.where(calls.has("2"), 0.0, calls.ns)))
    ns = np.median(calls.ns[loops], axis=0)
    between = np.median(np.diff(others[loops], axis=1), axis=0)
    falls = np.flatnonzero(ns[2:] < np.minimum(ns[1:-1], ns[:-2]) / _GROWS) + 2
    for part in np.split(np.arange(len(ns)), falls):
        third = len(part) // 3
        if len(part) < LEAST_CALLS:
            continue
        order = pd.Series(ns[part]).rank().to_numpy()
        rises = np.ptp(ns[part]) > 0 and np.corrcoef(np.arange(len(part)), order)[0, 1] >= _IN_ORDER
        rises &= np.median(ns[part[-third:]]) >= _GROWS * np.median(ns[part[:third]])
        work = between[part[:-1]]
        if rises and _gain(work, third) <= _READS * _gain(ns[part], third):
            yield part


def _gain(ns: NDArray[np.float64], third: int) -> float:
    """Return how much longer a call of the last third takes than one of the first."""
    return float(ns[-third:].mean() - ns[:third].mean())


# ---- products with one-hot rows, which select rows of a matrix: an embedding does that without a product

ONE_HOT, GRADIENT = "one_hot and a product", "the product's gradient"

_HOT_PRODUCT = re.compile(r"ht*1")

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@within_rank
def one_hot_chains(
    calls: Calls = needs(calls), spans: Frame = needs(schema.SPANS), rank: RankFacts = needs(RANK)
) -> list[Chain]:
    """Return products with one-hot rows, and their gradients.

    An embedding takes at most the product's time × the share of bytes that it moves: N rows of h read and written, of
    the N × V, V × h and N × h that the product moves; in the backward pass also the whole matrix. Where shapes are not
    known, all of the product's time stays.
    """
    found: list[Chain] = []
    for first, last in calls.find(_HOT_PRODUCT):
        places = np.arange(first, last)
        shape = _shape(calls, spans, last - 1) or _counted(rank.facts)
        forward, backward = _shares(*shape) if shape else (1.0, 1.0)
        whole = calls.took(places)
        found.append(Chain(ONE_HOT, "forward", places, forward * calls.took(places[-1:]) / whole if whole else 1.0))
        if shape and len(made := calls.made(last - 1, last)):
            found.append(Chain(GRADIENT, "backward", made, backward))
    return found


@per_rank
def one_hots(one_hot_chains: list[Chain] = needs(one_hot_chains), replaced: Replaced = needs(replaced)) -> pd.DataFrame:
    """Return products with one-hot rows, and their gradients, as `calls.replaced` does."""
    return replaced(one_hot_chains)


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


# ---- recurrent networks that are written out: the same cell again and again, a product, gates, elementwise operators

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
    found = list(_recurrent(calls))
    if not found:
        return []
    parameters = sum(int(o.get("parameters") or 0) for o in rank.facts.get("optimizers") or [])
    if not parameters:
        raise NotMeasured("how many parameters the model has was not recorded (record with `dlprof wrap`)")
    return [one for one, products in found if parameters < products]


@per_rank
def recurrent_loops(
    recurrent_chains: list[Chain] = needs(recurrent_chains), replaced: Replaced = needs(replaced)
) -> pd.DataFrame:
    """Return the time of written-out recurrent networks, as `calls.replaced` does; a fix leaves two kernels a turn."""
    return replaced(recurrent_chains)


def _recurrent(calls: Calls) -> Iterator[tuple[Chain, int]]:
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
