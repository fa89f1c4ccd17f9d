"""The operators of each thread as a text, one letter each, in which regular expressions find chains.

Only outermost operators count: the script did not write what `aten::layer_norm` calls. A small letter is an operator of
the forward pass, the capital one a backward function of that name; autograd's numbers tell which operator created it.

The time of chains of operators in a mean steady step, and the saving with one operator instead of each chain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.compute.cpu_work import in_all_steps
from dlprof.analysis.compute.kernels import kernels
from dlprof.analysis.engine import Frame, Maybe, by_rank, maybe, needs, within_rank
from dlprof.analysis.modules.frames import forward_rows
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import LEAST_KERNEL_NS, device_work, has_device
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.analysis.timeline.what_if import LITTLE, WhatIf, what_if
from dlprof.errors import NotMeasured

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
    "0": "max amax",
    "@": "erf",
    "4": "embedding embedding_bag _embedding_bag",
    "7": "sigmoid sigmoid_",
    "8": "tanh tanh_",
    "9": "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell",
}
_LETTERS = {f"aten::{name}": letter for letter, names in _OPERATORS.items() for name in names.split()}
# By the names of backward functions: of ToCopy it is that of _to_copy.
_MADE = {name.removeprefix("aten::").replace("_", ""): letter for name, letter in _LETTERS.items()}
_NO_LETTER = re.compile(
    r"aten::(?:_?reshape\w*|view\w*|_unsafe_view|expand\w*|unsqueeze|squeeze|select|slice|narrow|split\w*|chunk|unbind"
    r"|unflatten|flatten|transpose|permute|t|movedim|swapaxes|as_strided|alias|detach|lift_fresh|empty\w*|new_empty\w*"
    r"|arange|zeros|zeros_like|new_zeros|result_type|item|is_nonzero|_local_scalar_dense)$"
    r"|(?:autograd::engine::evaluate_function: )?(?:torch::autograd::AccumulateGrad$|(?:View|UnsafeView|ReshapeAlias"
    r"|Expand|Unsqueeze|Squeeze|Select|Slice|Narrow|Split\w*|Unbind|Transpose|Permute|T|AsStrided|Alias|Clone)"
    r"Backward\d+$)"
)
# What also creates functions of that letter.
_ALSO = {"l": "c", "n": "c"}
# The engine's range around one also includes the accumulation of gradients.
_FUNCTION = re.compile(r"(?:autograd::engine::evaluate_function: )?(\w+)Backward\d+$")

# Between two operators of a chain Python takes some µs; a longer pause is something else.
_PAUSE_NS = 50_000


class Calls(Struct, frozen=True, dict=True):
    """The operators that have a letter, thread after thread, each thread's in order; arrays have an item each.

    `rows`: of the spans. `begin`, `end`: on the host, ns. `ns`: the time of the kernels that it launched, or on a CPU
    its own time until the next operator, in steady traced steps; 0 outside them. `step`: the place of the steady traced
    step that it, or its kernels, belong to; −1: none. `kernel_of`: for each of `kernels` the operator that launched it;
    −1: none. `functions`: the places of backward functions, in the order of `makers`, the places of the operators that
    created them.
    """

    text: str
    rows: NDArray[np.int64]
    lane: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    ns: NDArray[np.float64]
    step: NDArray[np.int64]
    kernel_of: NDArray[np.int64]
    functions: NDArray[np.int64]
    makers: NDArray[np.int64]

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

    def made(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the places of the backward functions that operators from one place to another created, as they run."""
        return np.sort(self.functions[slice(*np.searchsorted(self.makers, (first, last)).tolist())])

    def took(self, places: NDArray[np.int64]) -> float:
        """Return what calls took in the steady traced steps, ns."""
        return float(self.ns[places].sum())


@within_rank
def calls(
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    has_device: bool = needs(has_device),
    timing: Timing = needs(timing),
    kernels: Maybe[Frame] = maybe(kernels),
) -> Calls:
    """Return the outermost operators of all threads."""
    names, codes = [str(name) for name in spans["name"].cat.categories], spans["name"].cat.codes.to_numpy()
    letters = np.array([ord(_letter(name) or "\0") for name in names], dtype=np.uint8)
    functions = np.array([_FUNCTION.match(name) is not None for name in names], dtype=bool)
    counted = functions | ~np.array([host.names_frame(name) for name in names], dtype=bool)
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
    text = letter.tobytes().decode()
    back = np.flatnonzero(functions[codes[rows]])
    made_by = forward_rows(spans, is_on_device, rows[back])
    makers = _launched_by(made_by, spans, lane, begin, end) if (made_by >= 0).any() else _as_many(text, back, step)
    order = np.argsort(makers, kind="stable")[np.count_nonzero(makers < 0) :]
    return Calls(text, rows, lane, begin, end, ns, step, kernel_of, back[order], makers[order])


def _letter(name: str) -> str:
    """Return an operator's letter; "o" (forward) or "O" (backward) for operators that are not listed."""
    if _NO_LETTER.match(name):
        return ""
    made = _FUNCTION.match(name)
    return _capital(_MADE.get(made[1].lower(), "o")) if made else _LETTERS.get(name, "o")


def _capital(letter: str) -> str:
    return {"1": "3", "2": "6", "4": "5", "7": "!", "8": "#", "9": "$", "0": "%", "@": "="}.get(letter, letter.upper())


def _as_many(text: str, functions: NDArray[np.int64], step: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of the operator that made each function, in a trace without numbers; −1: not known.

    Functions run in the opposite order. Of a step in which they are not as many as the operators it is not known.
    """
    letters = np.array(list(text))
    found = np.full(len(functions), -1, dtype=np.int64)
    for letter in _OPERATORS:
        mine = np.flatnonzero(letters[functions] == _capital(letter))
        makers = np.flatnonzero((letters == letter) | (letters == _ALSO.get(letter, letter)))
        for one in np.unique(step[functions[mine]]).tolist():
            theirs, of = makers[step[makers] == one], mine[step[functions[mine]] == one]
            if one >= 0 and len(theirs) == len(of):
                found[of] = theirs[::-1]
    return found


def _launched_by(
    owner: NDArray[np.int64],
    spans: pd.DataFrame,
    lane: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the place of the outermost operator around each of `owner`, rows of the spans; −1: none, or no row."""
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


class Chain(Struct, frozen=True):
    """Places in `Calls`, in order, and the share of their time that a fix leaves.

    `form`: how it is computed; `passes`: "forward" or "backward". `launching`: the share that is left of the host's
    time to launch it; None: the same.
    """

    form: str
    passes: str
    places: NDArray[np.int64]
    left: float
    launching: float | None = None


def chains(calls: Calls, form: str, first: int, last: int, left: tuple[float, float]) -> Iterator[Chain]:
    """Yield the chain from a first place to a last (exclusive), and that of the backward functions it created.

    `left`: the share that a fix leaves of each of the two.
    """
    yield Chain(form, "forward", np.arange(first, last), left[0])
    if len(made := calls.made(first, last)):
        yield Chain(form, "backward", made, left[1])


COLUMNS = ("form", "passes", "calls", "operators", "ns", "left_ns", "gain_ns")

Replaced = Callable[[Sequence[Chain]], pd.DataFrame]  # see `replaced`


@within_rank
def replaced(
    calls: Calls = needs(calls),
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
    what_if: Maybe[WhatIf] = maybe(what_if),
    kernels: Maybe[Frame] = maybe(kernels),
    device_work: Maybe[Frame] = maybe(device_work),
) -> Replaced:
    """Return a function from chains to a frame: their time in a mean steady traced step, the longest first.

    Columns: form, passes, calls (of the chain), operators (in one), ns, left_ns (the time of one operator instead),
    gain_ns (how much shorter the mean steady step would be, the same in each row). On a device gain_ns comes from a
    replay of the traced steps with that share of the kernels and of the host's time to launch them; on a CPU it is
    ns − left_ns. Chains outside the steady steps do not count.
    """

    def made(chains: Sequence[Chain]) -> pd.DataFrame:
        chosen = [chain for chain in chains if calls.took(chain.places) > 0]
        if not chosen:
            return pd.DataFrame({c: pd.Series(dtype="str" if c in COLUMNS[:2] else float) for c in COLUMNS})
        ns = np.array([calls.took(chain.places) for chain in chosen])
        shares = np.array([chain.left for chain in chosen])
        left = np.minimum(np.maximum(ns * shares, LEAST_KERNEL_NS * (has_device & (shares > 0))), ns)
        each = pd.DataFrame([(c.form, c.passes, len(c.places)) for c in chosen], columns=["form", "passes", "size"])
        each = each.assign(ns=ns, left_ns=left)
        n = max(len(timing.windows), 1)
        frame = each.groupby(["form", "passes"], sort=False, as_index=False).agg(
            calls=("ns", "size"), operators=("size", "mean"), ns=("ns", "sum"), left_ns=("left_ns", "sum")
        )
        gain = float((ns - left).sum()) / n
        if has_device:
            gain = _replayed(chosen, left, gain)
        frame = frame.assign(**{c: frame[c] / n for c in ("calls", "ns", "left_ns")}, gain_ns=gain)
        return frame.sort_values("ns", ascending=False, kind="stable", ignore_index=True)[list(COLUMNS)]

    def _replayed(chains: Sequence[Chain], left: NDArray[np.float64], gain: float) -> float:
        try:
            whatif = what_if.get()
        except NotMeasured:
            return gain
        launching = _launching(chains, calls)
        most = gain * len(timing.windows) + sum(iv.total(times) * (1 - share) for times, share in launching)
        if most < LITTLE * whatif.measured_ns * len(timing.windows):
            return gain
        durations = whatif.replay.durations.copy()
        place = pd.Series(np.arange(len(durations)), device_work.get().index.to_numpy()[whatif.replay.rows])
        rows = kernels.get().index.to_numpy()
        order = np.argsort(calls.kernel_of, kind="stable")
        launched_by = calls.kernel_of[order]
        for chain, ns in zip(chains, left.tolist(), strict=True):
            bounds = np.searchsorted(launched_by, np.add.outer(chain.places, (0, 1))).tolist()
            launched = np.concatenate([order[first:last] for first, last in bounds])
            mine = np.sort(place.reindex(rows[launched]).dropna().to_numpy(dtype=np.int64))
            remaining = max(round(chain.left * len(mine)), int(chain.left > 0))
            durations[mine] = -1
            durations[mine[:remaining]] = max(round(ns / max(remaining, 1)), 1)
        return whatif.gain_ns(durations=durations, other=launching)

    return made


def _launching(chains: Sequence[Chain], calls: Calls) -> list[tuple[iv.Intervals, float]]:
    """Return when the host launched chains, with the share of that time that a fix leaves."""
    by_share: dict[float, list[NDArray[np.int64]]] = {}
    for chain in chains:
        parts = np.split(chain.places, np.flatnonzero(np.diff(chain.places) > 1) + 1)
        by_share.setdefault(chain.left if chain.launching is None else chain.launching, []).extend(parts)
    return [
        (iv.union(*(of[[part[n] for part in parts]] for of, n in ((calls.begin, 0), (calls.end, -1)))), share)
        for share, parts in by_share.items()
    ]


def gains(chains: Frame, cpu_parts: Maybe[Frame], cpu_work: Maybe[Frame], on_cpu: bool) -> dict[int, float]:
    """Return how much shorter each rank's mean steady step would be with its chains fixed, ns.

    `chains`: frames as `replaced` makes them, a rank's one after the other.
    """
    found = by_rank(chains.drop_duplicates("rank"), "gain_ns")
    return in_all_steps(found, cpu_parts.get(), cpu_work.get()) if on_cpu else found
