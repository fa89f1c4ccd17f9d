"""Finds the activations of a backward pass: the tensors that the autograd graph keeps, by module.

The graph is walked from the roots of backward(), before it begins. Nothing is hooked: hooks on saved tensors would turn
off PyTorch's check for in-place changes, make Dynamo recompile, and hide the effect of the script's own hooks. If such
a hook (checkpointing, offloading) has packed a tensor, what the hook keeps is counted; the tensor is never unpacked,
which would recompute it.

A node knows its sequence number on its thread, but not its module. The numbers at the beginning and the end of a
module's call show which nodes belong to it.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dlprof.record.model import state
from dlprof.record.model.state import Key

# Walking a larger graph, such as that of an unrolled simulation, would delay its step for seconds.
_MOST_NODES = 100_000

# The most nodes between a parameter and its copy by autocast, including views of either.
_FARTHEST = 4

_COPIES = ("ToCopyBackward0",)
_VIEWS = ("TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0")

_CHECKPOINT = "torch.utils.checkpoint"

_NOT_MADE_IN_ORDER = 1 << 62  # the number of a node that accumulates a gradient


@dataclass(slots=True, eq=False)
class Calls:
    """The calls of modules within a step, by the numbers of the nodes that were next when they began and ended."""

    _starts: list[int] = field(default_factory=list)
    _owners: list[int] = field(default_factory=list)  # id of the module that runs from then on, or 0
    _open: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def depth(self) -> int:
        """The number of open calls."""
        return len(self._open)

    def enter(self, module: int, number: int) -> None:
        """Record that the call of a module begins."""
        self._open.append(module)
        self._starts.append(number)
        self._owners.append(module)

    def leave(self, number: int) -> None:
        """Record that the innermost call ends."""
        if self._open:
            self._open.pop()
            self._starts.append(number)
            self._owners.append(self._open[-1] if self._open else 0)

    def owner(self, number: int) -> int:
        """Return the id of the innermost module that ran when a node was created, or 0."""
        at = bisect_right(self._starts, number) - 1
        return self._owners[at] if at >= 0 else 0


@dataclass(slots=True, frozen=True)
class Kept:
    """A storage that a graph keeps, with the first node that keeps it."""

    number: int
    size: int
    device: str
    dtype: str
    cast_of: int = 0  # id of the parameter if it is a copy of one in another data type


@dataclass(slots=True, eq=False)
class Graph:
    """The tensors that a backward pass needs, when it begins."""

    ends: int  # the number of the next node
    begins: int = _NOT_MADE_IN_ORDER  # the number of its first node
    kept: dict[Key, Kept] = field(default_factory=dict)
    nodes: int = 0
    names: dict[type, tuple[str, ...]] = field(default_factory=dict)  # of each class of nodes, its saved tensors
    checkpoints: dict[int, int] = field(default_factory=dict)  # by id, the first node within each
    recomputed: int = 0  # tensors that checkpointing will compute again
    unseen: Counter[str] = field(default_factory=Counter)  # nodes that keep what Python cannot see, by name
    whole: bool = True  # False if it has too many nodes


def can_walk() -> bool:
    """Return whether this PyTorch shows a saved tensor without unpacking it: 2.10 and later do."""
    saved: Any = getattr(sys.modules["torch"]._C._autograd, "SavedTensor", None)
    return hasattr(saved, "unpack_hook") and hasattr(saved, "data")


def walk(roots: Any) -> Graph:
    """Look at all that backward() from these roots (tensors, or edges of the graph) will need."""
    torch: Any = sys.modules["torch"]
    graph = Graph(torch._C._autograd._get_sequence_nr())
    open_nodes: list[Any] = []
    for root in roots if isinstance(roots, (tuple, list)) and not hasattr(roots, "node") else (roots,):
        node = getattr(root, "node", None) if not isinstance(root, torch.Tensor) else root.grad_fn
        if node is not None:
            open_nodes.append(node)
    seen = set(open_nodes)  # keep the nodes themselves: PyTorch creates a new object for a node without references
    while open_nodes:
        if graph.nodes >= _MOST_NODES:
            graph.whole = False
            return graph
        node = open_nodes.pop()
        graph.nodes += 1
        _look(node, graph)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                open_nodes.append(following)
    return graph


def _look(node: Any, graph: Graph) -> None:
    kind = type(node)
    names = graph.names.get(kind)
    if names is None:
        names = graph.names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    number = node._sequence_nr()
    if number < _NOT_MADE_IN_ORDER:
        graph.begins = min(graph.begins, number)
    if not names:
        if "CppNode" in node.name():
            graph.unseen[node.name()[:80]] += 1
        return
    for name in names:
        try:
            saved = getattr(node, name)
        except RuntimeError:  # an earlier backward pass has freed it
            continue
        for one in saved if isinstance(saved, (tuple, list)) else (saved,):
            _take(one, number, graph)
    own = getattr(node, "__dict__", None)  # attributes that a Python Function set on its context
    if own:
        for tensor in state.tensors_in(own):
            _keep(tensor, number, graph)
    if kind.__name__ == "CheckpointFunctionBackward":
        graph.recomputed += 1


def _take(saved: Any, number: int, graph: Graph) -> None:
    """Count a saved tensor, or the object into which a hook has packed it."""
    try:
        packed, hook = saved.data, saved.unpack_hook
    except (AttributeError, RuntimeError):  # there is none, or it was freed
        return
    if type(packed).__module__ == _CHECKPOINT:
        graph.recomputed += 1
        _look_at_checkpoint(hook, number, graph)
        return
    for tensor in state.tensors_in(packed):
        _keep(tensor, number, graph)


def _look_at_checkpoint(hook: Any, number: int, graph: Graph) -> None:
    """Count the inputs that a checkpoint keeps and the results that its policy saves; once for each checkpoint."""
    frame = _enclosed(hook, "_CheckpointFrame")
    if frame is None or graph.checkpoints.get(id(frame), _NOT_MADE_IN_ORDER) <= number:
        return
    graph.checkpoints[id(frame)] = number
    inputs = getattr(frame, "saved_args", None)
    if inputs is None:  # older versions of PyTorch kept them in a node
        inputs = getattr(getattr(frame, "input_saver", None), "_raw_saved_tensors", None)
    for one in inputs or ():
        _take(one, number, graph)
    saved_results = _enclosed(frame.recompute_fn, "_CachedTorchDispatchMode")
    for results in (getattr(saved_results, "storage", None) or {}).values():
        for result in results.values() if isinstance(results, dict) else results:
            for one in result if isinstance(result, (tuple, list)) else (result,):
                for tensor in state.tensors_in(getattr(one, "val", None)):
                    _keep(tensor, number, graph)


def _enclosed(function: Any, kind: str) -> Any:
    """Return the object of a class that a function has in its closure; None if there is none."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found = cell.cell_contents
        except ValueError:  # it is empty
            continue
        if type(found).__name__ == kind:
            return found
    return None


def _keep(tensor: Any, number: int, graph: Graph) -> None:
    for one in state.plain(tensor):
        known = state.of(one)
        if known is None:
            continue
        key, size = known
        before = graph.kept.get(key)
        if before is None or number < before.number:
            cast_of = _copied_parameter(one) if before is None else before.cast_of
            graph.kept[key] = Kept(number, size, str(one.device), state.dtype_of(one), cast_of)


def _copied_parameter(tensor: Any) -> int:
    """Return the id of the parameter that a tensor copies in another data type, or 0 if it is something else."""
    node, copied = tensor.grad_fn, False
    for _ in range(_FARTHEST):
        name = type(node).__name__
        if name == "AccumulateGrad":
            return id(node.variable) if copied else 0
        if name not in (*_COPIES, *_VIEWS):
            return 0
        copied = copied or name in _COPIES
        node = node.next_functions[0][0]
    return 0


class Fullest:
    """Finds the moment at which all graphs together keep most.

    A graph keeps a tensor from the creation of its node until its backward pass begins. Several micro-batches of a
    pipeline exist at the same time, and tensors that two losses share are kept once.
    """

    def __init__(self) -> None:
        self.most: dict[Key, Kept] = {}
        self.size = -1
        self._open: list[tuple[int, dict[Key, Kept]]] = []  # when a backward pass began, and what was kept then

    def add(self, graph: Graph, kept: dict[Key, Kept]) -> int:
        """Add what a graph keeps when its backward pass begins; return the bytes that are known to be kept now."""
        still = []
        for ends, there in self._open:
            if graph.begins < ends:
                there |= {key: one for key, one in kept.items() if one.number < ends and key not in there}
                still.append((ends, there))
            self._judge(there)
        self._open = [*still, (graph.ends, dict(kept))]
        self._judge(self._open[-1][1])
        return sum(one.size for one in kept.values())

    def _judge(self, there: dict[Key, Kept]) -> None:
        size = sum(one.size for one in there.values())
        if size > self.size:
            self.size, self.most = size, dict(there)
