"""The operators of each thread as a text, one letter each, in which regular expressions find chains.

Only outermost operators count: the script did not write what `aten::layer_norm` calls. A small letter is an operator of
the forward pass, the capital one the backward function that autograd created for it; those run in reverse order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steps import Timing

# Operators by their letter. Views and allocations have none.
_OPERATORS = {
    "a": "add",
    "b": "sub rsub",
    "c": "cross_entropy_loss",
    "d": "std",
    "e": "exp",
    "f": "softmax _softmax",
    "g": "log",
    "h": "one_hot scatter scatter_",
    "i": "index gather take_along_dim",
    "j": "clamp clamp_min clip",
    "k": "div true_divide",
    "l": "log_softmax _log_softmax",
    "m": "mean",
    "n": "nll_loss nll_loss_nd nll_loss2d",
    "p": "pow square",
    "q": "sqrt",
    "r": "rsqrt",
    "s": "sum",
    "t": "to _to_copy type_as",
    "u": "neg",
    "v": "var",
    "w": "var_mean std_mean",
    "x": "mul",
    "y": "logsumexp",
    "z": "reciprocal",
    "1": "linear matmul mm addmm bmm baddbmm",
    "2": "cat concat",
    "4": "embedding embedding_bag _embedding_bag",
}
_LETTERS = {f"aten::{name}": letter for letter, names in _OPERATORS.items() for name in names.split()}
_NO_LETTER = re.compile(
    r"aten::(?:_?reshape\w*|view\w*|_unsafe_view|expand\w*|unsqueeze|squeeze|select|slice|narrow|split\w*|chunk|unbind"
    r"|unflatten|flatten|transpose|permute|t|movedim|swapaxes|as_strided|alias|detach|lift_fresh|empty\w*|new_empty\w*"
    r"|arange|zeros|zeros_like|new_zeros|result_type|item|is_nonzero|_local_scalar_dense)$"
    r"|(?:autograd::engine::evaluate_function: )?(?:torch::autograd::AccumulateGrad$|(?:View|UnsafeView|ReshapeAlias"
    r"|Expand|Unsqueeze|Squeeze|Select|Slice|Narrow|Split\w*|Unbind|Transpose|Permute|T|AsStrided|Alias|Clone)"
    r"Backward\d+$)"
)
# Backward functions by the same letters, as capitals.
_FUNCTIONS = {
    "A": "Add",
    "B": "Sub Rsub",
    "D": "Std",
    "E": "Exp",
    "F": "Softmax",
    "G": "Log",
    "H": "Cat",
    "I": "Index Gather",
    "J": "Clamp ClampMin",
    "K": "Div",
    "L": "LogSoftmax",
    "M": "Mean",
    "N": "NllLoss NllLoss2D",
    "P": "Pow",
    "Q": "Sqrt",
    "R": "Rsqrt",
    "S": "Sum",
    "T": "ToCopy",
    "U": "Neg",
    "V": "Var",
    "W": "VarMean StdMean",
    "X": "Mul",
    "Y": "Logsumexp",
    "Z": "Reciprocal",
    "3": "Mm Addmm Bmm Baddbmm Linear",
    "5": "Embedding EmbeddingBag",
}
_MADE = {name: letter for letter, names in _FUNCTIONS.items() for name in names.split()}
# The engine's range around one also includes the accumulation of gradients.
_FUNCTION = re.compile(r"(?:autograd::engine::evaluate_function: )?(\w+)Backward\d+$")

# Between two operators of a chain Python takes some µs; a longer pause is something else.
_PAUSE_NS = 50_000


@dataclass(frozen=True)
class Calls:
    """The operators that have a letter, thread after thread, each thread's in order; arrays have an item each.

    `rows`: of the spans. `begin`, `end`: on the host, ns. `ns`: the time of the kernels that it launched, or on a CPU
    its own time until the next operator, in steady traced steps; 0 outside them. `step`: the place of the steady traced
    step that it, or its kernels, belong to; −1: none. `kernel_of`: for each of `kernels` the operator that launched it;
    −1: none.
    """

    text: str
    rows: NDArray[np.int64]
    lane: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    ns: NDArray[np.float64]
    step: NDArray[np.int64]
    kernel_of: NDArray[np.int64]

    def find(self, pattern: re.Pattern[str]) -> Iterator[tuple[int, int]]:
        """Yield first and last place (exclusive) of each match of a pattern, within one thread.

        No pattern may match an "o" or "O".
        """
        text, places, edges = self._short
        for begin, end in pairwise(edges):
            for found in pattern.finditer(text, begin, end):
                yield places[found.start()], places[found.end() - 1] + 1

    def has(self, letter: str) -> NDArray[np.bool_]:
        """Return for each operator whether it has this letter."""
        found: NDArray[np.bool_] = np.frombuffer(self.text.encode(), np.uint8) == ord(letter)
        return found

    @cached_property
    def _short(self) -> tuple[str, list[int], list[int]]:
        """The text with one operator left of those without a letter of their own that follow each other, the places of
        what is left, and where each thread begins in it: most operators have none, and there are many patterns.
        """
        plain = self.has("o") | self.has("O")
        begins = np.diff(self.lane, prepend=-1) != 0
        left = np.flatnonzero(begins | ~plain | np.append(True, ~plain[:-1])[: len(plain)])
        text = np.frombuffer(self.text.encode(), np.uint8)[left].tobytes().decode()
        return text, left.tolist(), [*np.flatnonzero(begins[left]).tolist(), len(left)]

    def took(self, first: int, last: int) -> float:
        """Return the time from one place to another (exclusive) in the steady traced steps, ns."""
        return float(self.ns[first:last].sum())


@within_rank
def calls(
    spans: pd.DataFrame,
    is_on_device: NDArray[np.bool_],
    has_device: bool,
    timing: Timing,
    kernels: Maybe[pd.DataFrame],
) -> Calls:
    """Return the outermost operators of all threads."""
    names, codes = [str(name) for name in spans["name"].cat.categories], spans["name"].cat.codes.to_numpy()
    letters = np.array([ord(_letter(name) or "\0") for name in names], dtype=np.uint8)
    counted = np.array([_FUNCTION.match(name) is not None or not host.names_frame(name) for name in names], dtype=bool)
    rows = np.flatnonzero(host.is_kind(spans, "op") & ~is_on_device & counted[codes])
    # As narrow as the codes are: NumPy sorts those in a tenth of the time.
    rows = rows[np.argsort(spans["lane"].cat.codes.to_numpy()[rows], kind="stable")]
    code = spans["lane"].cat.codes.to_numpy()[rows]
    begin = spans["start_ns"].to_numpy()[rows]
    end = begin + spans["dur_ns"].to_numpy()[rows]
    edges = np.append(np.flatnonzero(np.diff(code, prepend=-1)), len(code))
    outer = np.ones(len(rows), dtype=bool)
    for first, last in pairwise(edges.tolist()):
        reach = np.maximum.accumulate(end[first:last])
        outer[first + 1 : last] = begin[first + 1 : last] >= reach[:-1]
    letter = letters[codes[rows]]
    kept = np.flatnonzero(outer & (letter != 0))
    rows, begin, end, letter = rows[kept], begin[kept], end[kept], letter[kept]
    lane: NDArray[np.int64] = code[kept].astype(np.int64)
    kernel_of = np.empty(0, dtype=np.int64)
    if has_device:
        work = kernels.get()
        kernel_of = _launched_by(work["owner"].to_numpy(), spans, lane, begin, end)
        chosen = (kernel_of >= 0) & (work["step"].to_numpy() >= 0)
        ns = np.bincount(kernel_of[chosen], work["dur_ns"].to_numpy()[chosen], len(rows)).astype(float)
        step = np.full(len(rows), -1, dtype=np.int64)
        step[kernel_of[chosen]] = work["step"].to_numpy()[chosen]
    else:
        inside = iv.holds(timing.windows, begin)
        step = np.where(inside, np.searchsorted(timing.windows[:, 0], begin, side="right") - 1, -1)
        following = np.append(begin[1:], 0)
        same = np.append(lane[1:] == lane[:-1], False)
        pause = np.where(same & (following - end < _PAUSE_NS), following - end, 0)
        ns = np.where(inside, end - begin + np.maximum(pause, 0), 0).astype(float)
    return Calls(letter.tobytes().decode(), rows, lane, begin, end, ns, step, kernel_of)


def _letter(name: str) -> str:
    """Return an operator's letter; "o" (forward) or "O" (backward) for operators that are not listed."""
    if _NO_LETTER.match(name):
        return ""
    made = _FUNCTION.match(name)
    return _MADE.get(made[1], "O") if made else _LETTERS.get(name, "o")


def _launched_by(
    owner: NDArray[np.int64],
    spans: pd.DataFrame,
    lane: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return for each kernel the place of the outermost operator around `owner`, its operator's row of the spans."""
    found = np.full(len(owner), -1, dtype=np.int64)
    known = np.flatnonzero(owner >= 0)
    on = spans["lane"].cat.codes.to_numpy()[owner[known]].astype(np.int64)
    at = spans["start_ns"].to_numpy()[owner[known]]
    for one in np.unique(lane).tolist():
        mine, there = np.flatnonzero(on == one), np.flatnonzero(lane == one)
        place = np.searchsorted(begin[there], at[mine], side="right") - 1
        inside = place >= 0
        inside[inside] = at[mine][inside] < end[there[place[inside]]]
        found[known[mine[inside]]] = there[place[inside]]
    return found
