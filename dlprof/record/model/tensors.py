"""Counts the tensors that models, optimizers and autograd graphs hold, each storage once, in rows of the table `held`.

Between steps: parameters, gradients, buffers, state, buckets. Nothing is computed, no data is read and no device is
queried: the host has the sizes of all tensors. The only script code that runs is that with which tensor subclasses list
their inner tensors, as PyTorch requires.

The activations of a backward pass are the tensors that the autograd graph keeps. It is walked from the roots of
backward(), before that begins. Nothing is hooked: hooks on saved tensors would turn off PyTorch's check for in-place
changes, make Dynamo recompile, and hide the effect of the script's own hooks. If such a hook (checkpointing,
offloading) has packed a tensor, what the hook keeps is counted; the tensor is never unpacked, which would recompute it.
A node knows its sequence number on its thread, but not its module. The numbers at the beginning and the end of a
module's call show which nodes belong to it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlprof.record.model.names import alive, class_of, modules_of, names_of, names_of_all
from dlprof.record.observed import Observed

_MASTER = "master"  # the key for copies of the parameters in higher precision

# Attributes in which optimizers keep an optimizer that they wrap, and the most levels of it.
_INNER = ("optim", "optimizer")
_DEEPEST = 4


class Model:
    """One outermost module with everything inside it or, without a module, the tensors that an optimizer updates."""

    def __init__(
        self, module: Any = None, others: Sequence[Any] = (), names: Mapping[int, Owner] | None = None
    ) -> None:
        self.names: Mapping[int, Owner] = {} if module is None else names_of(module) if names is None else names
        self.name: Owner = self.names.get(id(module), ("", ""))
        self.parameters: dict[int, Owner] = {}  # by id
        self.replicates = False  # its modules run in several threads
        self.full: dict[int, int] = {}  # elements before sharding, where a parameter does not say so itself
        self._in_buckets: set[int] = set()  # by id: their gradients lie in DistributedDataParallel's buckets
        self._kept: list[tuple[Any, Owner]] = []
        self._shared: list[tuple[Any, Owner]] = []  # with the further modules that share them
        self.modules: list[tuple[Any, Owner]] = []
        for one in modules_of(module) if module is not None else ():
            owner = self.names.get(id(one), ("", type(one).__name__))
            self.modules.append((one, owner))
            self.replicates = self.replicates or type(one).__name__ == "DataParallel"
            self.full |= _full_of(one)
            if type(one).__name__ == "DistributedDataParallel" and one.gradient_as_bucket_view:
                self._in_buckets |= {id(parameter) for parameter in one._module_parameters}
            for parameter in one._parameters.values():
                self._keep(parameter, owner)
        for parameter in others:
            self._keep(parameter, self.name)

    def _keep(self, parameter: Any, owner: Owner) -> None:
        if parameter is None:
            return
        if id(parameter) in self.parameters:
            self._shared.append((parameter, owner))
            return
        self.parameters[id(parameter)] = owner
        self._kept.append((parameter, owner))

    @property
    def tensors(self) -> Iterator[Any]:
        """All parameters."""
        return (parameter for parameter, _ in self._kept)

    def count(self, into: Storages) -> None:
        """Count parameters and buffers."""
        for parameter, owner in self._kept:
            full = self.full.get(id(parameter))
            into.add("parameter", owner, parameter, full=full, trainable=parameter.requires_grad)
        for parameter, owner in self._shared:
            if parameter.requires_grad:
                whole = self.full.get(id(parameter), parameter.numel()) * parameter.element_size()
                into.add_like("shared", owner, parameter, 0, whole)
        for module, owner in self.modules:
            for buffer in module._buffers.values():
                if buffer is not None:
                    into.add("buffer", owner, buffer)

    def count_gradients(self, into: Storages) -> None:
        """Count the gradients that exist, and the space in buckets for those that do not."""
        for parameter, owner in self._kept:
            gradient = parameter.grad if parameter.is_leaf else None
            if gradient is not None:
                into.add("gradient", owner, gradient, full=self.full.get(id(parameter)))
            elif id(parameter) in self._in_buckets and parameter.requires_grad:
                size = parameter.numel() * parameter.element_size()
                into.add_like("gradient", owner, parameter, size, size)

    def count_gathered(self, into: Storages) -> None:
        """Count the parameters that FSDP has gathered from all ranks and not freed yet."""
        for module, owner in self.modules:
            for tensor in _gathered_by(module):
                into.add("communication", owner, tensor)

    def count_buckets(self, into: Storages) -> None:
        """Count DistributedDataParallel's buckets, each of the size of its gradients, unless they hold these."""
        for module, owner in self.modules:
            if type(module).__name__ != "DistributedDataParallel" or module.gradient_as_bucket_view:
                continue
            for parameter in module._module_parameters:
                if parameter.requires_grad:
                    size = parameter.numel() * parameter.element_size()
                    into.add_like("communication", owner, parameter, size, size)


def models_of(observed: Observed) -> list[Model]:
    """Return the script's models, largest first, and a model of other tensors that its optimizers update."""
    modules = alive(observed.models)
    names = names_of_all(modules)
    models = sorted((Model(module, names=names) for module in modules), key=lambda model: -len(model.parameters))
    known: set[int] = set()
    kept = []
    for model in models:
        if not known.issuperset(model.parameters):  # otherwise it is part of another model
            kept.append(model)
            known |= model.parameters.keys()
    others = [p for one in alive(observed.optimizers) for p in _stepped(one) if id(p) not in known]
    if others and not (kept and _are_masters(others, kept)):
        kept.append(Model(others=others))
    return kept


# Searching 3 million objects takes a quarter of a second. The interpreter counts its blocks of memory without a list of
# them: 3.6 for each object of a process that has imported torch and pandas.
_MOST_BLOCKS = 10_000_000


def count_idle(models: Sequence[Model], into: Storages) -> None:
    """Count as buffers the tensors of modules that no step calls, such as averaged copies of the weights."""
    module: Any = sys.modules["torch"].nn.Module
    known = {id(one) for model in models for one, _ in model.modules}
    if sys.getallocatedblocks() > _MOST_BLOCKS:
        return
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if module in kind.__mro__}
    idle = {id(one): one for one in objects if type(one) in kinds and "_modules" in vars(one)}
    inner = {id(child) for one in idle.values() for child in one._modules.values()}
    for outer in (one for key, one in idle.items() if key not in inner and key not in known):
        with contextlib.suppress(Exception):  # an unusual class, or an incomplete object
            owner = (f"({class_of(outer)})", class_of(outer))
            for one in outer.modules():
                tensors = () if id(one) in known else (*one._parameters.values(), *one._buffers.values())
                for tensor in (one for one in tensors if one is not None):
                    into.add("buffer", owner, tensor)


def state_of(optimizer: Any, models: Sequence[Model], into: Storages) -> dict[str, Any]:
    """Count an optimizer's state, and return its entry in held.json."""
    owners: dict[int, Owner] = {}
    full: dict[int, int] = {}
    for model in models:
        owners |= model.parameters
        full |= model.full
    sums: dict[tuple[str, str, str], list[int]] = {}

    def add(key: str, owner: Owner, tensor: Any, elements: int | None) -> None:
        for device, dtype, size, whole in into.add("optimizer", owner, tensor, full=elements):
            found = sums.setdefault((key, dtype, device), [0, 0])
            found[0] += size
            found[1] += whole

    for one in _all_of(optimizer):
        for parameter, state in (vars(one).get("state") or {}).items():
            owner = owners.get(id(parameter), ("", ""))
            elements = full.get(id(parameter))
            for key, value in state.items() if isinstance(state, dict) else (("", state),):
                for tensor in tensors_in(value):
                    same = elements is not None and tensor.numel() == parameter.numel()
                    add(str(key)[:80], owner, tensor, elements if same else None)
        for parameter in _stepped(one):
            if id(parameter) not in owners:
                add(_MASTER, ("", ""), parameter, None)
    state = [
        {"key": key, "dtype": dtype, "device": device, "bytes": size, "full_bytes": whole}
        for (key, dtype, device), (size, whole) in sums.items()
    ]
    return {"class": type(optimizer).__name__, "state": state}


def _all_of(optimizer: Any) -> Iterator[Any]:
    """Return an optimizer and the optimizers that it wraps."""
    kind: Any = sys.modules["torch"].optim.Optimizer
    seen: list[Any] = []
    while optimizer is not None and len(seen) < _DEEPEST and all(optimizer is not one for one in seen):
        seen.append(optimizer)
        yield optimizer
        inner = (vars(optimizer).get(name) for name in _INNER)
        optimizer = next((one for one in inner if isinstance(one, kind)), None)


def _stepped(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _are_masters(others: Sequence[Any], models: Sequence[Model]) -> bool:
    """Return whether other tensors of an optimizer are copies of the parameters, which then have 16 bits."""
    stored = {
        parameter.element_size() for model in models for parameter in model.tensors if parameter.is_floating_point()
    }
    return min(stored, default=4) < 4 and all(parameter.element_size() >= 4 for parameter in others)


def _full_of(module: Any) -> dict[int, int]:
    """Return the number of elements before sharding of FSDP1's parameters, by id."""
    flat = _flat_of(module)
    if flat is None:
        return {}
    shapes = zip(getattr(flat, "_params", None) or (), getattr(flat, "_shapes", ()), strict=False)
    return {id(flat): flat._unpadded_unsharded_size.numel(), **{id(p): shape.numel() for p, shape in shapes}}


def _flat_of(module: Any) -> Any:
    handle = vars(module).get("_handle") if type(module).__name__ == "FullyShardedDataParallel" else None
    return getattr(handle, "flat_param", None)


def _gathered_by(module: Any) -> Iterator[Any]:
    flat = _flat_of(module)
    if flat is not None:
        yield from (t for name in ("_full_param_padded", "_mp_shard") if (t := vars(flat).get(name)) is not None)
        return
    if not any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
        return
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for parameter in getattr(group, "fsdp_params", ()):
            whole = vars(parameter).get("_unsharded_param")
            yield from (*(() if whole is None else (whole,)), *(vars(parameter).get("all_gather_outputs") or ()))


# The most parts of a nested value that are visited, and the greatest depth of nested tensors.
_MOST_PARTS, _DEEPEST_STORAGE = 1_000, 4

# Classes of tensors without storage.
_UNREAL = ("FakeTensor", "FunctionalTensor")
Owner = tuple[str, str]  # a module's path and class
Key = int  # of a storage


class Storages:
    """Sums tensors. In a shared storage each tensor counts its own bytes, and the first one also the rest."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Any, ...], list[int]] = {}  # part, path, class, device, dtype, trainable → sums
        self._left: dict[Key, list[Any]] = {}  # bytes that no tensor counts yet, and the row of the first tensor

    def add(
        self, part: str, owner: Owner, tensor: Any, *, full: int | None = None, trainable: bool = False
    ) -> list[tuple[str, str, int, int]]:
        """Count a tensor. Return device, data type, bytes, and bytes before sharding of each tensor inside it.

        `full` is its number of elements before sharding, if the tensor does not have it.
        """
        added = []
        if full is None and type(tensor).__name__ == "DTensor":
            full = int(tensor.numel())  # of the whole, of which this rank has a part
        for one in plain(tensor):
            known = storage_of(one)
            if known is None:
                continue
            key, size = known
            sums = self._sums(part, owner, one, trainable)
            left = self._left.setdefault(key, [size, sums])
            own = min(one.numel() * one.element_size(), left[0])
            left[0] -= own
            whole = own if full is None else full * one.element_size()
            _add(sums, own, whole)
            added.append((str(one.device), dtype_of(one), own, whole))
        return added

    def add_like(self, part: str, owner: Owner, like: Any, size: int, full: int) -> None:
        """Count a tensor that has its storage alone; `full` is its bytes before sharding, or of what it shares."""
        _add(self._sums(part, owner, like), size, full)

    def _sums(self, part: str, owner: Owner, tensor: Any, trainable: bool = False) -> list[int]:
        return self.rows.setdefault((part, *owner, str(tensor.device), dtype_of(tensor), int(trainable)), [0, 0, 0])

    def by_device(self) -> dict[str, int]:
        """Return the bytes of all rows, by device."""
        sizes: dict[str, int] = {}
        for row, sums in self.rows.items():
            sizes[row[3]] = sizes.get(row[3], 0) + sums[1]
        return sizes

    def settle(self) -> None:
        """Add the bytes of a storage that no tensor counts (padding, the rest around a view) to its first tensor."""
        for left in self._left.values():
            left[1][1] += left[0]
            left[1][2] += left[0]
            left[0] = 0

    def __contains__(self, key: Key) -> bool:
        """Return whether a storage was counted."""
        return key in self._left


def _add(sums: list[int], size: int, full: int) -> None:
    sums[0] += 1
    sums[1] += size
    sums[2] += full


def storage_of(tensor: Any) -> tuple[Key, int] | None:
    """Return a key of a plain tensor's storage, unique while it is alive, and its bytes; None if it has none."""
    try:
        if tensor.device.type == "meta" or type(tensor).__name__ in _UNREAL:
            return None
        storage = tensor.untyped_storage()
        # Not its address in memory: reading that would copy a storage that is copied on write.
        return storage._cdata, storage.nbytes()
    except (AttributeError, NotImplementedError, RuntimeError):  # it has none
        return None


def plain(tensor: Any, depth: int = 0) -> Iterator[Any]:
    """Return the tensors with storages that a tensor consists of; for a DTensor, its local tensor."""
    torch: Any = sys.modules["torch"]
    functorch: Any = torch._C._functorch
    for _ in range(_DEEPEST_STORAGE):
        if not functorch.is_functorch_wrapped_tensor(tensor):
            break
        tensor = functorch.get_unwrapped(tensor)
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
        return
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        yield tensor
        return
    for name in flatten(tensor)[0] if depth < _DEEPEST_STORAGE else ():
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from plain(inner, depth + 1)


def dtype_of(tensor: Any) -> str:
    """Return the name of a tensor's data type: "float32"."""
    return str(tensor.dtype).replace("torch.", "")


def tensors_in(value: Any) -> Iterator[Any]:
    """Return the tensors in a value and in nested lists, tuples and dicts, but not in objects of other classes."""
    tensor: Any = sys.modules["torch"].Tensor
    parts = [value]
    for _ in range(_MOST_PARTS):
        if not parts:
            return
        part = parts.pop()
        if isinstance(part, tensor):
            yield part
        elif isinstance(part, dict):
            parts.extend(dict.values(part))
        elif isinstance(part, tuple):
            parts.extend(tuple.__iter__(part))
        elif isinstance(part, list):
            parts.extend(list.__iter__(part))


# Walking a larger graph, such as that of an unrolled simulation, would delay its step for seconds.
_MOST_NODES = 100_000

# The most nodes between a parameter and its copy by autocast, including views of either.
_FARTHEST = 4

_COPIES = ("ToCopyBackward0",)
_VIEWS = ("TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0")

_CHECKPOINT = "torch.utils.checkpoint"

_NOT_MADE_IN_ORDER = 1 << 62  # the number of a node that accumulates a gradient


@dataclass(slots=True, eq=False)
class ModuleCalls:
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
        for tensor in tensors_in(own):
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
    for tensor in tensors_in(packed):
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
                for tensor in tensors_in(getattr(one, "val", None)):
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
    for one in plain(tensor):
        known = storage_of(one)
        if known is None:
            continue
        key, size = known
        before = graph.kept.get(key)
        if before is None or number < before.number:
            cast_of = _copied_parameter(one) if before is None else before.cast_of
            graph.kept[key] = Kept(number, size, str(one.device), dtype_of(one), cast_of)


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
