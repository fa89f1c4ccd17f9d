"""Frames of the host's threads: forward passes of modules, functions of the backward pass, FSDP's work, optimizers.

dlprof names each module's forward pass `nn.Module: PATH (Class)` while it traces. A trace with stacks (with_stack=True)
names it `nn.Module: Class_N`; the path is then made of the names around the module's first call.

A function of the backward pass is linked to the operator of the forward pass that created it. Autograd numbers the
functions that a thread creates in order. The profiler records the number and the thread with a function that runs; with
an operator it records the number that the thread's next function will get. So the last operator with a function's
number created it: later operators have higher numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, within_rank
from dlprof.analysis.modules.compiled import GRAPH, Pieces, pieces
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.host import is_on_device
from dlprof.errors import NotMeasured
from dlprof.read.kineto.patterns import ENGINE

# The kinds of a frame: the part of the step to which its own time counts.
FORWARD, RECOMPUTE, BACKWARD, COMMUNICATION, OPTIMIZER, INPUT, OTHER = range(7)
PARTS = ("forward", "recompute", "backward", "communication", "optimizer", "input", "other")

NO_MODULES = "the trace has no names of modules (traces by dlprof do, and those by torch.profiler with with_stack=True)"

_OURS = re.compile(r"nn\.Module: (.*) \(([^()]+)\)", re.DOTALL)
_OF_STACKS = re.compile(r"nn\.Module: ((\w+)_\d+)")
_ACCUMULATES = f"{ENGINE}torch::autograd::AccumulateGrad"
# FSDP2 names the module, or modules, that it works for, except the outermost one. For FSDP1 dlprof names it.
_FSDP = re.compile(
    r"FSDP::\w+(?: \(([^,)]*)(?:,[^)]*)?\)| for ([^,\[]*)(?:,[^\[]*)?)?(?: \[.*\])?"
    r"|dlprof::(?:all_gather|reduce) nn\.Module: (.*) \([^()]+\)",
    re.DOTALL,
)
# Without a name, the hook reduces for the function around it. The module of a gather ahead of time is not known.
_HOOK = "FullyShardedDataParallel._post_backward_hook"
_FIRST = re.compile(r"FullyShardedDataParallel\._(?:\w+_prefetch|post_backward_hook)")
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#", "dlprof::optimizer")
# The parts that wrappers add to the path of a module.
_WRAPPED = re.compile(r"(?:^|\.)(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)(?=\.|$)")
_WRAPPERS = (
    "CheckpointWrapper",
    "DataParallel",
    "DeepSpeedEngine",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
)


@dataclass(frozen=True)
class Frames:
    """The frames of a rank's host, by lane, each lane's in order of start, longer ones first.

    `row` is a frame's row in the spans (−1: none), `lane` its lane's code, `parent` the frame around it (−1: none),
    `module` its place in `paths` and `classes` (−1: none), `part` one of PARTS. `calls` marks calls of a module,
    `functions` the functions of the backward pass, `accumulates` those of them that accumulate the gradient of a
    parameter, and `pieces` parts of compiled graphs; the ranges of these graphs are the rows `divided`.
    `by_lane` has for each lane the instants at which the innermost frame changes, and that frame (−1: none).
    """

    row: NDArray[np.int64]
    lane: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    parent: NDArray[np.int64]
    module: NDArray[np.int64]
    part: NDArray[np.int64]
    calls: NDArray[np.bool_]
    functions: NDArray[np.bool_]
    accumulates: NDArray[np.bool_]
    pieces: NDArray[np.bool_]
    paths: tuple[str, ...]
    classes: tuple[str, ...]
    by_lane: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]
    divided: NDArray[np.int64]

    def at(self, lane: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the innermost frame on each lane at each instant; −1: none."""
        found = np.full(len(at), -1, dtype=np.int64)
        for code, (begins, inner) in self.by_lane.items():
            mine = np.flatnonzero(lane == code)
            place = np.searchsorted(begins, at[mine], side="right") - 1
            found[mine] = np.where(place >= 0, inner[np.maximum(place, 0)], -1)
        return found


@within_rank
def module_frames(
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    compiled: Maybe[Frame] = maybe(schema.COMPILED),
    modules: Maybe[Frame] = maybe(schema.MODULES),
) -> Frames:
    """Return the frames of a rank's host; raise NotMeasured where the trace has no names of modules.

    Compiled graphs are divided into the modules that their kernels were made of, as far as that is recorded.
    """
    graphs = compiled.or_none()
    frames = _called(spans, is_on_device, needs_names=graphs is None)
    if graphs is None:
        return frames
    row = spans.index.to_numpy()[host.is_named(spans, GRAPH) & ~is_on_device]
    lane, start = spans["lane"].cat.codes.to_numpy()[row].astype(np.int64), spans["start_ns"].to_numpy()[row]
    inner = frames.at(lane, start)
    within = dict(zip(row.tolist(), inner.tolist(), strict=True))
    caller = {at: frames.paths[m] for at, one in within.items() if one >= 0 and (m := frames.module[one]) >= 0}
    tree = modules.or_none()
    kinds = {} if tree is None else dict(zip(tree["path"].astype(str), tree["kind"].astype(str), strict=True))
    return _divided(frames, pieces(spans, is_on_device, graphs, caller), within, kinds)


def _divided(frames: Frames, found: Pieces, within: Mapping[int, int], kinds: Mapping[str, str]) -> Frames:
    """Return the frames with these pieces as frames of their own, inside those that their graphs are in."""
    modules = dict(zip(frames.paths, frames.classes, strict=True))
    known = [path in modules or path in kinds for path in found.path.tolist()]
    modules |= {path: kinds[path] for path in found.path[known].tolist() if path not in modules}
    place = {path: n for n, path in enumerate(modules)}
    outer = np.array([within[graph] for graph in found.graph[known].tolist()], dtype=np.int64)
    inside = outer >= 0
    added = {
        "row": found.row[known],
        "lane": found.lane[known],
        "start": found.start[known],
        "end": found.end[known],
        "parent": outer,
        "module": np.array([place[path] for path in found.path[known].tolist()], dtype=np.int64),
        "part": np.where(inside, frames.part[outer] if len(frames.part) else FORWARD, FORWARD),
    }
    count = len(outer)
    columns = {name: np.concatenate((getattr(frames, name), values)) for name, values in added.items()}
    for name in ("calls", "functions", "accumulates", "pieces"):
        columns[name] = np.append(getattr(frames, name), np.full(count, name == "pieces"))
    order = np.lexsort((-columns["end"], columns["start"], columns["lane"]))
    columns = {name: values[order] for name, values in columns.items()}
    lane, start, end = columns["lane"], columns["start"], columns["end"]
    columns["parent"] = _parents(lane, start, end)
    by_lane = _innermost(lane, start, end, columns["parent"])
    divided = np.unique(found.graph[known])
    return Frames(**columns, paths=tuple(modules), classes=tuple(modules.values()), by_lane=by_lane, divided=divided)


def _called(spans: pd.DataFrame, is_on_device: NDArray[np.bool_], *, needs_names: bool) -> Frames:
    texts = [str(name) for name in spans["name"].cat.categories]
    kinds, codes = _kinds(spans, texts, is_on_device), spans["name"].cat.codes.to_numpy()
    if needs_names and not (kinds == FORWARD).any():
        raise NotMeasured(NO_MODULES)
    row = np.flatnonzero((kinds >= 0) & (spans["dur_ns"].to_numpy() > 0))
    lane = spans["lane"].cat.codes.to_numpy()[row].astype(np.int64)
    order = np.argsort(lane, kind="stable")
    row, lane, name = row[order], lane[order], codes[row[order]].astype(np.int64)
    start = spans["start_ns"].to_numpy()[row]
    end = start + spans["dur_ns"].to_numpy()[row]
    parent = _parents(lane, start, end)
    part: NDArray[np.int64] = kinds[row].astype(np.int64)
    calls, functions = part == FORWARD, part == BACKWARD

    called = set(name[calls].tolist())
    named = {code: (m[1], m[2]) for code, m in _matches(_OURS, texts).items() if code in called}
    if called and not named:
        named = _paths_of_stacks(name, parent, calls, {c: (m[1], m[2]) for c, m in _matches(_OF_STACKS, texts).items()})
    modules = sorted(set(named.values()))
    place = {module: number for number, module in enumerate(modules)}
    of_name = np.full(len(texts), -1, dtype=np.int64)
    of_name[list(named)] = [place[module] for module in named.values()]
    for code, found in _matches(_FSDP, texts).items():
        of_name[code] = next((place[m] for m in modules if m[0] == _unit(found)), -1)
    module = np.where(calls | (part == COMMUNICATION), of_name[name], -1)
    # Calls within a function of the backward pass recompute activations, and so do all calls inside them.
    part[calls & _among_ancestors(parent, functions)] = RECOMPUTE
    made = Frames(
        row,
        lane,
        start,
        end,
        parent,
        module,
        part,
        calls,
        functions,
        np.array([t.startswith(_ACCUMULATES) for t in texts], dtype=bool)[name],
        np.zeros(len(row), dtype=bool),
        tuple(path for path, _ in modules),
        tuple(kind for _, kind in modules),
        _innermost(lane, start, end, parent),
        np.empty(0, dtype=np.int64),
    )
    module[functions] = _of_functions(spans, is_on_device, made)[functions]
    hooks = np.flatnonzero(np.array([t == _HOOK for t in texts], dtype=bool)[name] & (parent >= 0))
    module[hooks] = module[parent[hooks]]
    return made


def _kinds(spans: pd.DataFrame, texts: list[str], is_on_device: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Return each span's kind of frame, −1 for none; dlprof's names of modules are preferred to those of stacks."""
    kinds = np.full(len(spans), -1, dtype=np.int8)
    codes = spans["name"].cat.codes.to_numpy()

    def mark(wanted: Iterable[int], frame: int, *of: str) -> bool:
        chosen = np.zeros(len(texts), dtype=bool)
        chosen[list(wanted)] = True
        rows = np.flatnonzero(chosen[codes] & host.is_kind(spans, *of) & ~is_on_device) if chosen.any() else codes[:0]
        kinds[rows] = frame
        return len(rows) > 0

    if not mark(_matches(_OURS, texts), FORWARD, "annotation"):
        mark(_matches(_OF_STACKS, texts), FORWARD, "python")
    mark([code for code, text in enumerate(texts) if text.startswith(ENGINE)], BACKWARD, "op")
    for pattern in (_FSDP, _FIRST):
        if mark(_matches(pattern, texts), COMMUNICATION, "annotation"):
            break
    mark([code for code, text in enumerate(texts) if text.startswith(_OPTIMIZER)], OPTIMIZER, "annotation")
    kinds[host.is_kind(spans, "fetch") & ~is_on_device] = INPUT
    return kinds


def _matches(pattern: re.Pattern[str], texts: list[str]) -> dict[int, re.Match[str]]:
    """Return the matches of a pattern among the names, by code."""
    return {code: found for code, text in enumerate(texts) if (found := pattern.fullmatch(text)) is not None}


def _of_functions(spans: pd.DataFrame, is_on_device: NDArray[np.bool_], frames: Frames) -> NDArray[np.int64]:
    """Return the module of each function of the backward pass: that of the operator that created it. −1: none.

    AccumulateGrad has no sequence number. The engine runs it before all other ready functions, so it follows the
    function that computed the gradient, on the same thread.
    """
    module = np.full(len(frames.row), -1, dtype=np.int64)
    numbered = np.flatnonzero(frames.functions & ~frames.accumulates)
    made_by = forward_rows(spans, is_on_device, frames.row[numbered])
    known = made_by >= 0
    lane, start = spans["lane"].cat.codes.to_numpy().astype(np.int64), spans["start_ns"].to_numpy()
    around = frames.at(lane[made_by[known]], start[made_by[known]])
    module[numbered[known]] = np.where(around >= 0, frames.module[around], -1)
    mine = np.flatnonzero(frames.accumulates)
    if len(numbered):
        at = np.searchsorted(numbered, mine) - 1
        giver = numbered[np.maximum(at, 0)]
        same = (at >= 0) & (frames.lane[giver] == frames.lane[mine])
        module[mine] = np.where(same, module[giver], -1)
    return module


def _parents(lane: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the frame around each, on its lane; a frame that outlasts the one around it is cut at that one's end."""
    parent = np.full(len(lane), -1, dtype=np.int64)
    for code in np.unique(lane):
        mine = np.flatnonzero(lane == code)
        inside = host.parents(start[mine], end[mine])
        parent[mine] = np.where(inside >= 0, mine[np.maximum(inside, 0)], -1)
    for _ in range(host.MOST_DEEP):
        over = (parent >= 0) & (end > end[np.maximum(parent, 0)])
        if not over.any():
            break
        end[over] = end[parent[over]]
    return parent


def _among_ancestors(parent: NDArray[np.int64], wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for each frame whether any frame around it is wanted."""
    found = np.zeros(len(parent), dtype=bool)
    at = parent.copy()
    for _ in range(host.MOST_DEEP):
        left = np.flatnonzero(at >= 0)
        if not len(left):
            break
        found[left] |= wanted[at[left]]
        at[left] = np.where(found[left], -1, parent[at[left]])
    return found


def _innermost(
    lane: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64], parent: NDArray[np.int64]
) -> dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return for each lane the instants at which another frame becomes the innermost one, and which."""
    found = {}
    for code in np.unique(lane).tolist():
        mine = np.flatnonzero(lane == code)
        at = np.concatenate((end[mine], start[mine]))
        inner = np.concatenate((parent[mine], mine))
        begins = np.repeat((0, 1), len(mine))
        # At one instant frames end before others begin, the inner ones first.
        order = np.lexsort((np.concatenate((-mine, mine)), begins, at))
        found[code] = (at[order], inner[order])
    return found


def _paths_of_stacks(
    names: NDArray[np.int64], parent: NDArray[np.int64], calls: NDArray[np.bool_], known: dict[int, tuple[str, str]]
) -> dict[int, tuple[str, str]]:
    """Return path and class of each name of a trace with stacks; the outermost module with most modules inside is "".

    A wrapper has the path and class of the module that it wraps, as in dlprof's recordings.
    """
    mine = np.flatnonzero(calls)
    around = _nearest(parent, calls)[mine]
    first = np.unique(names[mine], return_index=True)[1].tolist()
    outer = {int(names[mine[i]]): int(names[around[i]]) if around[i] >= 0 else -1 for i in first}
    wrapped = {of: code for code, of in outer.items() if of >= 0 and known[of][1] in _WRAPPERS}
    inside: Counter[int] = Counter()
    for code in outer:
        inside[_root(code, outer)] += 1
    model = inside.most_common(1)[0][0]
    found = {}
    for code in outer:
        chain: list[int] = []
        at = code
        while at >= 0 and len(chain) < host.MOST_DEEP:
            chain.append(at)
            at = outer[at]
        inner = code
        while inner in wrapped and len(chain) < host.MOST_DEEP:
            inner = wrapped[inner]
            chain.insert(0, inner)
        steps = [known[one][0] for one in reversed(chain) if one not in wrapped]
        # The path of the model itself is "". Other outermost modules, such as a loss, are in brackets.
        path = steps[1:] if chain[-1] == model else [f"({steps[0]})", *steps[1:]]
        found[code] = (".".join(path), known[inner][1])
    return found


def _root(code: int, outer: dict[int, int]) -> int:
    """Return the outermost module around one; none calls itself so deep."""
    for _ in range(host.MOST_DEEP):
        if outer[code] < 0:
            break
        code = outer[code]
    return code


def _nearest(parent: NDArray[np.int64], wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the nearest wanted frame around each; −1: none."""
    at = parent.copy()
    for _ in range(host.MOST_DEEP):
        skip = np.flatnonzero((at >= 0) & ~wanted[np.maximum(at, 0)])
        if not len(skip):
            break
        at[skip] = parent[at[skip]]
    return at


def _unit(found: re.Match[str]) -> str:
    """Return the path of the module that FSDP works for."""
    return _WRAPPED.sub("", found[1] or found[2] or found[3] or "").removeprefix(".")


# Some operators have no number, such as views. Their function counts to the operator before them, if that created one
# of the last _NEAR functions.
_NEAR = 4


# The most threads that are searched, those with the most operators first.
_MOST_LANES = 64


def forward_rows(
    spans: pd.DataFrame, is_on_device: NDArray[np.bool_], functions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for rows of backward functions the row of the operator that made each; −1: the trace does not hold it."""
    found = np.full(len(functions), -1, dtype=np.int64)
    number, thread = spans["autograd"].to_numpy().copy(), spans["forward_thread"].cat.codes.to_numpy().copy()
    makes = (number >= 0) & host.is_one_of(spans["forward_thread"], "") & host.is_kind(spans, "op") & ~is_on_device
    operators = np.flatnonzero(makes)
    lane = spans["lane"].cat.codes.to_numpy()
    lanes, counts = np.unique(lane[operators], return_counts=True)
    name = pd.factorize(np.array([_plain(str(n)) for n in spans["name"].cat.categories]))[0]
    name = name[spans["name"].cat.codes.to_numpy()]
    unnumbered = functions[number[functions] < 0]
    inner = _inner(spans, name, unnumbered)
    number[unnumbered], thread[unnumbered] = number[inner], thread[inner]
    with_number = np.flatnonzero(number[functions] >= 0)
    # The trace does not link thread numbers to lanes. Take the lane that fits best.
    threads = thread[functions]
    best = np.full(int(threads.max(initial=0)) + 1, -1, dtype=np.int64)
    for code in lanes[np.argsort(-counts, kind="stable")][:_MOST_LANES]:
        made_by = _last(
            number, spans["start_ns"].to_numpy(), operators[lane[operators] == code], functions[with_number]
        )
        # A match by number counts 1, by number and name 2.
        exact = (made_by >= 0) & (number[made_by] == number[functions[with_number]])
        fits = exact * (1 + (name[made_by] == name[functions[with_number]]))
        score = np.bincount(threads[with_number], weights=fits, minlength=len(best)).astype(np.int64)
        better = (score > best)[threads[with_number]]
        found[with_number[better]] = made_by[better]
        best = np.maximum(best, score)
    return found


def _inner(spans: pd.DataFrame, name: NDArray[np.int64], ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the function that runs in each of the engine's ranges, else the range itself.

    The profiler numbers a range only where its function is the first thing in it: hooks run before.
    """
    functions = np.flatnonzero(~host.is_one_of(spans["forward_thread"], "") & ~host.is_named(spans, ENGINE))
    if not len(functions) or not len(ranges):
        return ranges
    # Rows are in order of start.
    key = (name * (int(spans["lane"].cat.codes.max()) + 1) + spans["lane"].cat.codes.to_numpy()) * len(spans)
    key += np.arange(len(spans))
    functions = functions[np.argsort(key[functions])]
    at = np.minimum(np.searchsorted(key[functions], key[ranges]), len(functions) - 1)
    start = spans["start_ns"].to_numpy()
    found = functions[at]
    within = (key[found] > key[ranges]) & (key[found] // len(spans) == key[ranges] // len(spans))
    within &= start[found] < start[ranges] + spans["dur_ns"].to_numpy()[ranges]
    return np.where(within, found, ranges)


def _last(
    number: NDArray[np.int64], start: NDArray[np.int64], operators: NDArray[np.int64], functions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the last operator of a thread before each function with its number; else one with a number near it."""
    rows = np.concatenate((operators, functions))
    order = np.lexsort((np.repeat((0, 1), (len(operators), len(functions))), start[rows], number[rows]))
    last = np.maximum.accumulate(np.where(order < len(operators), np.arange(len(order)), -1))
    at = np.empty(len(rows), dtype=np.int64)
    at[order] = last
    at = at[len(operators) :]
    row = rows[order[np.maximum(at, 0)]]
    good = (at >= 0) & (number[functions] - number[row] <= _NEAR) & (start[row] <= start[functions])
    return np.where(good, row, -1)


def _plain(name: str) -> str:
    """Return what an operator and its function have in common: addmm of aten::addmm and of AddmmBackward0."""
    name = name.removeprefix(ENGINE).removeprefix("aten::")
    return name.partition("Backward")[0].replace("_", "").lower()
