"""Which module, and which part of the step, each span of a trace is for.

dlprof names each module's forward pass `nn.Module: PATH (Class)` while it traces. A trace with stacks (with_stack=True)
names it `nn.Module: Class_N`; the path is then made of the names around the module's first call.

A function of the backward pass is linked to the operator of the forward pass that created it. Autograd numbers the
functions that a thread creates in order. The profiler records the number and the thread with a function that runs; with
an operator it records the number that the thread's next function will get. So the last operator with a function's
number created it: later operators have higher numbers.

Graphs that torch.compile made are divided into the modules that they were made of. The recorder notes for each graph
which calls it makes, in their order, and what each is for (the table `compiled`). Of these the trace shows operators
and Triton's kernels, by their names: the n-th of a name in the graph's range is the n-th of that name in the table. C++
kernels are not shown: they are the time between two calls.

DistributedDataParallel puts the parameters into buckets and reduces these in the same order in each backward pass. If
the buckets were recorded, an exchange belongs to the modules of the bucket's parameters, in proportion to their bytes;
else to the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.paths import around
from dlprof.analysis.timeline.steps import TracedSteps, trace_window
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


class Frames(Struct, frozen=True):
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

    def places(self, paths: Iterable[str]) -> NDArray[np.int64]:
        """Return the place of each path's module, or of the nearest one around it; −1: none."""
        known = {path: n for n, path in reversed(list(enumerate(self.paths)))}
        return np.array([_nearest_path(path, known) for path in paths], dtype=np.int64)


def _nearest_path(path: str, known: Mapping[str, int]) -> int:
    while path and path not in known:
        path = path.rpartition(".")[0]
    return known.get(path, -1)


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
    row = spans.index.to_numpy()[host.is_named(spans, COMPILED_GRAPH) & ~is_on_device]
    lane, start = spans["lane"].cat.codes.to_numpy()[row].astype(np.int64), spans["start_ns"].to_numpy()[row]
    inner = frames.at(lane, start)
    within = dict(zip(row.tolist(), inner.tolist(), strict=True))
    caller = {at: frames.paths[m] for at, one in within.items() if one >= 0 and (m := frames.module[one]) >= 0}
    tree = modules.or_none()
    kinds = {} if tree is None else dict(zip(tree["path"].astype(str), tree["kind"].astype(str), strict=True))
    return _divided(frames, pieces(spans, is_on_device, graphs, caller), within, kinds)


def _divided(frames: Frames, found: pd.DataFrame, within: Mapping[int, int], kinds: Mapping[str, str]) -> Frames:
    """Return the frames with these pieces as frames of their own, inside those that their graphs are in."""
    modules = dict(zip(frames.paths, frames.classes, strict=True))
    found = found[found["path"].isin([*modules, *kinds])]
    modules |= {path: kinds[path] for path in found["path"] if path not in modules}
    place = {path: n for n, path in enumerate(modules)}
    outer = np.array([within[graph] for graph in found["graph"]], dtype=np.int64)
    added = {name: found[name].to_numpy() for name in ("row", "lane", "start", "end")}
    added["module"] = np.array([place[path] for path in found["path"]], dtype=np.int64)
    added["part"] = np.where(outer >= 0, frames.part[outer] if len(frames.part) else FORWARD, FORWARD)
    columns = {name: np.concatenate((getattr(frames, name), values)) for name, values in added.items()}
    for name in ("calls", "functions", "accumulates", "pieces"):
        columns[name] = np.append(getattr(frames, name), np.full(len(found), name == "pieces"))
    order = np.lexsort((-columns["end"], columns["start"], columns["lane"]))
    columns = {name: values[order] for name, values in columns.items()}
    lane, start, end = columns["lane"], columns["start"], columns["end"]
    columns["parent"] = _parents(lane, start, end)
    by_lane = _innermost(lane, start, end, columns["parent"])
    divided = np.unique(found["graph"].to_numpy())
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
    chains = {code: [code] for code in outer}
    for chain in chains.values():
        while outer[chain[-1]] >= 0 and len(chain) < host.MOST_DEEP:
            chain.append(outer[chain[-1]])
    model = Counter(chain[-1] for chain in chains.values()).most_common(1)[0][0]
    found = {}
    for code, chain in chains.items():
        inner = code
        while inner in wrapped and len(chain) < host.MOST_DEEP:
            inner = wrapped[inner]
            chain.insert(0, inner)
        steps = [known[one][0] for one in reversed(chain) if one not in wrapped]
        # The path of the model itself is "". Other outermost modules, such as a loss, are in brackets.
        path = steps[1:] if chain[-1] == model else [f"({steps[0]})", *steps[1:]]
        found[code] = (".".join(path), known[inner][1])
    return found


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


# -- compiled graphs

# How the range of a graph begins; its key follows.
COMPILED_GRAPH = "## Call CompiledFxGraph "


def pieces(
    spans: pd.DataFrame,
    is_on_device: NDArray[np.bool_],
    compiled: pd.DataFrame,
    called_by: Mapping[int, str],
) -> pd.DataFrame:
    """Return the stretches of the host's lanes in which a graph that `compiled` knows works for one module.

    Columns: row (of the span of the call that it begins with; −1: of none), graph (the row of its graph's range), lane
    (its code), start, end, path (the module's). `called_by`: by the row of a graph's range the module around it, where
    there is one. Modules that are alike share a graph, which names those of the first one: the others' own stand in
    their place.
    """
    graphs = {str(key): rows for key, rows in compiled.groupby("graph", observed=True, sort=False)}
    texts = [str(name) for name in spans["name"].cat.categories]
    names, lanes = spans["name"].cat.codes.to_numpy(), spans["lane"].cat.codes.to_numpy()
    start = spans["start_ns"].to_numpy()
    end = start + spans["dur_ns"].to_numpy()
    keys = {code: key for code, text in enumerate(texts) if (key := _key(text)) in graphs}
    found: list[tuple[int, int, int, int, str]] = []
    code_of = {text: code for code, text in enumerate(texts)}
    operators = {
        key: np.array([code_of.get(str(name), -1) for name in calls["operator"]], dtype=np.int64)
        for key, calls in graphs.items()
    }
    on_host = ~is_on_device & host.is_kind(spans, "op")
    wanted = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *operators.values()]))
    shown = np.flatnonzero(on_host & np.isin(names, wanted))
    by_lane = {lane: shown[lanes[shown] == lane] for lane in np.unique(lanes[shown]).tolist()}
    for at in np.flatnonzero(on_host & np.isin(names, list(keys))).tolist():
        key = keys[int(names[at])]
        there = by_lane.get(int(lanes[at]), shown[:0])
        first, last = np.searchsorted(start[there], (start[at], end[at])).tolist()
        mine = there[first:last]
        mine = mine[np.isin(names[mine], operators[key])]
        place = _matched(operators[key], names[mine], start[mine], end[mine])
        rows = np.append(mine, -1)[place]
        found += _stretches(_relocated(graphs[key], called_by.get(at)), rows, at, start, end)
    frame = pd.DataFrame(found, columns=["row", "graph", "start", "end", "path"])
    frame = frame.astype(dict.fromkeys(("row", "graph", "start", "end"), np.int64) | {"path": object})
    return frame.assign(lane=lanes[frame["graph"]].astype(np.int64))


def _key(text: str) -> str:
    return text.removeprefix(COMPILED_GRAPH).partition(" ")[0] if text.startswith(COMPILED_GRAPH) else ""


def _matched(
    wanted: NDArray[np.int64], names: NDArray[np.integer], start: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each call the place of the operator that is it; −1: it is not shown, or as many as others are not."""
    outer = np.ones(len(names), dtype=bool)
    outer[1:] = start[1:] >= np.maximum.accumulate(end)[:-1]
    found = np.full(len(wanted), -1, dtype=np.int64)
    for name in np.unique(wanted[wanted >= 0]).tolist():
        calls, shown = np.flatnonzero(wanted == name), np.flatnonzero(outer & (names == name))
        if len(calls) == len(shown):
            found[calls] = shown
    known = found[found >= 0]
    return found if (np.diff(known) > 0).all() else np.full_like(found, -1)


def _relocated(calls: pd.DataFrame, caller: str | None) -> list[tuple[str, str]]:
    """Return the module of each call and of what is before it, as they are called inside `caller`."""
    modules = list(zip(calls["module"].astype(str), calls["before"].astype(str), strict=True))
    if not caller:
        return modules
    whole = around({path for both in modules for path in both})
    if whole == caller or whole.startswith(f"{caller}."):
        return modules
    depth = caller.count(".") + 1
    if whole.count(".") + 1 < depth:
        return [(caller, caller)] * len(modules)
    ours = ".".join(whole.split(".")[:depth])
    return [(caller + module[len(ours) :], caller + before[len(ours) :]) for module, before in modules]


def _stretches(
    modules: list[tuple[str, str]],
    rows: NDArray[np.int64],
    graph: int,
    start: NDArray[np.int64],
    end: NDArray[np.int64],
) -> list[tuple[int, int, int, int, str]]:
    """Return a graph's pieces: each call, and the time before it; what is not shown is a part of the next one."""
    found: list[tuple[int, int, int, int, str]] = []
    at = int(start[graph])
    skipped: list[str] = []
    for (module, before), row in zip(modules, rows.tolist(), strict=True):
        if row < 0:
            skipped += [before, module]
            continue
        found.append((-1, graph, at, int(start[row]), around([*skipped, before])))
        found.append((row, graph, int(start[row]), int(end[row]), module))
        at, skipped = int(end[row]), []
    if found:
        found.append((-1, graph, at, int(end[graph]), around(skipped) if skipped else modules[-1][0]))
    merged: list[tuple[int, int, int, int, str]] = []
    for piece in found:
        if merged and merged[-1][4] == piece[4]:
            last = merged.pop()
            piece = (last[0] if last[0] >= 0 else piece[0], graph, last[2], piece[3], piece[4])
        merged.append(piece)
    return [piece for piece in merged if piece[3] > piece[2]]


# -- exchanges

# Calls that issue an exchange. Other spans of an exchange in a CPU run last until it has completed.
CALLS = ("c10d", "_c10d", "record_param_comms")


@within_rank
def bucket_shares(
    modules: Frame = needs(schema.MODULES), module_frames: Frames = needs(module_frames)
) -> NDArray[np.float64]:
    """Return for each bucket (a row, in the order in which they are reduced) the share of each of the trace's modules.

    A module that is not called in the trace counts to the one around it. Raises NotMeasured where no bucket is known.
    """
    known = modules[(modules["bucket"] >= 0) & (modules["parameter_bytes"] > 0)]
    if known.empty:
        raise NotMeasured("which parameters DistributedDataParallel reduces together is not recorded")
    module = module_frames.places(known["path"].astype(str))
    if (module < 0).any():
        raise NotMeasured("the trace shows another model than the recorded one")
    sizes = np.zeros((int(known["bucket"].max()) + 1, len(module_frames.paths)))
    np.add.at(sizes, (known["bucket"].to_numpy(), module), known["parameter_bytes"].to_numpy())
    shares: NDArray[np.float64] = sizes / np.maximum(sizes.sum(axis=1, keepdims=True), 1)
    return shares


def frames_of_calls(spans: pd.DataFrame, rows: NDArray[np.int64], frame: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the spans' frames, where those of exchanges that run on threads of their own are the issuing calls'.

    `rows` are the host's exchanges. They begin in the order in which they were issued: where there are as many as
    calls, the n-th is the n-th call's, else what the last call before it issued.
    """
    found = frame.copy()
    calls = rows[host.is_named(spans, "c10d", "_c10d")[rows]]
    works = rows[~host.is_named(spans, *CALLS)[rows]]
    alone = works[frame[works] < 0]
    if not len(calls) or not len(alone):
        return found
    start = spans["start_ns"].to_numpy()
    works, calls = (of[np.argsort(start[of], kind="stable")] for of in (works, calls))
    place = np.searchsorted(start[calls], start[works], side="right") - 1
    issued = np.arange(len(works)) if len(works) == len(calls) else place
    chosen = (frame[works] < 0) & (place >= 0)
    found[works[chosen]] = frame[calls[issued[chosen]]]
    return found


def buckets_of(
    spans: pd.DataFrame,
    rows: NDArray[np.int64],
    frame_start: NDArray[np.int64],
    steps: NDArray[np.int64],
    count: int,
    *,
    finds_unused: bool,
) -> NDArray[np.int64]:
    """Return the bucket of exchanges that frames issued which began at `frame_start`; −1: of none, or not known.

    `steps`: when the traced steps begin. Where a step has another number of exchanges than buckets, or several times as
    many as a job that accumulates gradients has, it is not known which is which. Where DistributedDataParallel looks
    for unused parameters, it exchanges behind the last bucket which were used.
    """
    found = np.full(len(rows), -1, dtype=np.int64)
    # Integers are no gradients: they show which parameters were used. Traces of a CPU hold no type.
    reduces = host.is_one_of(spans["collective"], "all_reduce") & ~host.is_one_of(spans["dtype"], "int32", "int64")
    unknown = finds_unused & host.is_one_of(spans["dtype"], "")
    step = np.searchsorted(steps, frame_start, side="right")
    # The same exchange is a call, within it another one, a range until it is through, and a kernel: each by its name.
    of = pd.factorize(spans["name"].cat.codes.to_numpy()[rows].astype(np.int64) * (len(steps) + 1) + step)[0]
    mine = np.flatnonzero(reduces[rows])
    if not len(mine):
        return found
    order = mine[np.lexsort((frame_start[mine], of[mine]))]
    sizes = np.bincount(of[mine])
    place = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[of[order]]
    each = count + unknown[rows[order]].astype(np.int64)
    found[order] = np.where((sizes[of[order]] % each == 0) & (place % each < count), place % each, -1)
    return found


# -- spans


@within_rank
def module_rows(
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    module_frames: Frames = needs(module_frames),
    bucket_shares: Maybe[NDArray[np.float64]] = maybe(bucket_shares),
    trace_window: TracedSteps = needs(trace_window),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return each span's module (a place in the paths of `module_frames`; −1: none), part of the step (one of PARTS),
    frame (a place in `module_frames`; −1: none) and bucket (a row of `bucket_shares`; −1: none), with the spans' index.

    Work on the host belongs to the innermost frame on its thread, work on a device to the frame of the call that
    launched it. A function of the backward pass belongs to the module whose forward pass created it, an exchange to the
    module whose parameters it moves, as far as that is known (exchanges.py), else to the model.

    Code from torch.compile belongs to the modules that its kernels were made of, where that is recorded; else as one
    piece to the module that calls it, as a CUDA graph's replay does.

    Raises NotMeasured where the trace has no names of modules.
    """
    lane, start = spans["lane"].cat.codes.to_numpy().astype(np.int64), spans["start_ns"].to_numpy()
    frame = np.full(len(spans), -1, dtype=np.int64)
    on_host = np.flatnonzero(~is_on_device)
    frame[on_host] = module_frames.at(lane[on_host], start[on_host])
    own = np.flatnonzero(module_frames.row >= 0)
    frame[module_frames.row[own]] = own
    on_device = np.flatnonzero(is_on_device & (spans["launch"].to_numpy() >= 0))
    frame[on_device] = _launched(spans, is_on_device, frame, spans["launch"].to_numpy()[on_device])
    # gloo's own threads run exchanges that another thread has issued.
    exchanged = np.flatnonzero(host.is_kind(spans, "communication"))
    frame[exchanged] = frames_of_calls(spans, exchanged[~is_on_device[exchanged]], frame)[exchanged]
    inside = frame >= 0
    module = np.where(inside, module_frames.module[np.maximum(frame, 0)], -1)
    part = np.where(inside, module_frames.part[np.maximum(frame, 0)], OTHER)

    gradients = exchanged[(frame[exchanged] >= 0) & module_frames.accumulates[frame[exchanged]]]
    model = module_frames.paths.index("") if "" in module_frames.paths else -1
    module[gradients], bucket = model, np.full(len(spans), -1, dtype=np.int64)
    shares = bucket_shares.or_none()
    if shares is not None:
        began = module_frames.start[frame[gradients]]
        wraps = [model.get("ddp") or {} for model in rank.facts.get("models") or ()]
        unused = any(one.get("find_unused_parameters") and not one.get("static_graph") for one in wraps)
        steps = trace_window.host[:, 0]
        bucket[gradients] = buckets_of(spans, gradients, began, steps, len(shares), finds_unused=unused)
        known = np.flatnonzero(bucket >= 0)
        # The innermost module around all parameters of a bucket.
        common = [around(module_frames.paths[n] for n in np.flatnonzero(of).tolist()) for of in shares]
        module[known] = module_frames.places(common)[bucket[known]]
    part[exchanged] = COMMUNICATION
    kinds = pd.Categorical.from_codes(part.astype(np.int8), categories=pd.Index(PARTS))
    places = {name: of.astype(np.int32) for name, of in (("module", module), ("frame", frame), ("bucket", bucket))}
    return pd.DataFrame({"part": kinds, **places}, index=spans.index)


def _launched(
    spans: pd.DataFrame, is_on_device: NDArray[np.bool_], frame: NDArray[np.int64], launch: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the frame of the call with each number of a launch; −1: there is no such call."""
    ids = spans["launch"].to_numpy()
    calls = np.flatnonzero(host.is_kind(spans, "runtime") & ~is_on_device & (ids >= 0))
    if not len(calls):
        return np.full(len(launch), -1, dtype=np.int64)
    calls = calls[np.argsort(ids[calls], kind="stable")]
    at = calls[np.minimum(np.searchsorted(ids[calls], launch), len(calls) - 1)]
    return np.where(ids[at] == launch, frame[at], -1)
