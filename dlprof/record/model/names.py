"""The modules of a script's model with their names, parameters and operators. Names are as in `named_modules`.

Wrappers such as DistributedDataParallel have no names of their own. An operator belongs to the module that runs; in the
backward pass, where no module is called, to the module that ran its forward operator. The table of modules has the
parameters of each and the bucket that exchanges their gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dlprof.plain import words_of

# Wrappers of PyTorch and others, and the attribute that holds the wrapped module.
_WRAPPERS = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}

# Errors that methods of the script's own classes have raised, by method, until the user is warned.
problems: dict[str, str] = {}


def alive(references: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return the objects of weak references that are still there."""
    return [one for reference in references if (one := reference()) is not None]


def modules_of(model: Any) -> list[Any]:
    """Return the modules of a model, from its own modules() or, if that fails, from torch's registry."""
    if (listed := _listed(model, "modules")) is not None:
        return listed
    found = {id(model): model}
    for module in (modules := [model]):
        new = {id(one): one for one in _registered(module, "_modules").values() if one is not None}
        modules += [one for key, one in new.items() if key not in found]
        found |= new
    return modules


def parameters_of(model: Any, *, recurse: bool = True) -> list[Any]:
    """Return the parameters of a model, from its own parameters() or, if that fails, from torch's registry."""
    if (listed := _listed(model, "parameters", recurse=recurse)) is not None:
        return listed
    modules = modules_of(model) if recurse else [model]
    every = (one for module in modules for one in _registered(module, "_parameters").values())
    return list({id(one): one for one in every if one is not None}.values())


def children_of(module: Any) -> list[tuple[str, Any]]:
    """Return the names and modules directly inside one."""
    if (listed := _listed(module, "named_children")) is not None:
        return listed
    return [(name, one) for name, one in _registered(module, "_modules").items() if one is not None]


def _listed(module: Any, method: str, **options: Any) -> list[Any] | None:
    try:
        return list(getattr(module, method)(**options))
    except Exception as e:  # noqa: BLE001 - the script's own class
        if method not in problems:
            problems[method] = f"{type(module).__name__}.{method}() fails ({words_of(e)}): read as torch has it instead"
        return None


def _registered(module: Any, name: str) -> dict[str, Any]:
    """Return the modules or parameters that torch keeps for a module, without calling the script's code."""
    return object.__getattribute__(module, "__dict__").get(name) or {}


def names_of(model: Any) -> dict[int, tuple[str, str]]:
    """Return the path ("" for the model itself) and class of each module of a model, by id.

    A wrapper has the name of the module that it wraps. A module with several paths has the first one. FSDP2 gives each
    module a class of its own; the name is that of the script's class.
    """
    names: dict[int, tuple[str, str]] = {}
    open_modules = [(model, "")]
    while open_modules:
        module, path = open_modules.pop()
        if id(module) in names:
            continue
        kept = wrapped(module)
        names[id(module)] = (path, class_of(module))
        if kept is not None:
            open_modules.append((kept, path))
            continue
        children = [(child, f"{path}.{name}" if path else name) for name, child in children_of(module)]
        open_modules.extend(reversed(children))
    return names


def names_of_all(models: Iterable[Any]) -> dict[int, tuple[str, str]]:
    """Return the same for several models; a model inside another one has its path there.

    The path of a single model is "". With several, such as a generator and a discriminator, paths begin with the class
    of the model in brackets; a second model of the same class has a number.
    """
    outer: list[tuple[Any, dict[int, tuple[str, str]]]] = []
    for model, names in sorted(((m, names_of(m)) for m in models), key=lambda one: -len(one[1])):
        if not any(id(model) in theirs for _, theirs in outer):
            outer.append((model, names))
    found: dict[int, tuple[str, str]] = {}
    seen: Counter[str] = Counter()
    for model, names in outer:
        kind = class_of(model)
        seen[kind] += 1
        root = f"{kind}#{seen[kind]}" if seen[kind] > 1 else kind
        for module, name in (names if len(outer) == 1 else below(root, names)).items():
            found.setdefault(module, name)
    return found


def below(root: str, names: dict[int, tuple[str, str]]) -> dict[int, tuple[str, str]]:
    """Return names whose paths begin with a name in brackets, for modules outside the model, such as a loss."""
    return {one: (f"({root}).{path}" if path else f"({root})", kind) for one, (path, kind) in names.items()}


def named(path: str, kind: str) -> str:
    """Return the name of a module in a trace."""
    return f"nn.Module: {path} ({kind})"


def class_of(module: Any) -> str:
    """Return the name of a module's class; for a wrapper, that of the module inside."""
    kind = type(module := unwrapped(module))
    sharded = kind.__name__.startswith("FSDP") and len(kind.__mro__) > 2 and kind.__mro__[1].__name__ == "FSDPModule"
    return str(kind.__mro__[2].__name__ if sharded else kind.__name__)


def wrapped(module: Any) -> Any:
    """Return the module that a wrapper wraps; None if it is not a wrapper."""
    name = _WRAPPERS.get(type(module).__name__)
    return None if name is None else getattr(module, name, None)


def unwrapped(module: Any) -> Any:
    """Return the module inside all wrappers."""
    while (kept := wrapped(module)) is not None:
        module = kept
    return module


# The parts of a step in which modules compute.
PARTS = ("forward", "recompute", "backward")

# Functions beyond this number are counted without their modules.
_MOST = 200_000


class Functions:
    """Remembers which module created which function of the backward pass, by autograd's sequence numbers."""

    def __init__(self, inner: Callable[[], str]) -> None:
        import torch

        autograd: Any = torch.autograd
        self._inner = inner
        # PyTorch documents neither. Without them the modules of a backward pass are unknown.
        self._next: Callable[[], int] | None = getattr(autograd, "_get_sequence_nr", None)
        self._running: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
        self._made_by: dict[int, str] = {}

    def module(self) -> tuple[str, str]:
        """Return the module whose operator runs now, or "", and forward, recompute or backward."""
        name, function = self._inner(), self._running()
        if name:
            if self._next is not None and len(self._made_by) < _MOST:
                # The function of an operator exists before a dispatch mode sees the operator. Later operators without
                # a function, such as one that counts batches, must not replace its module.
                self._made_by.setdefault(self._next() - 1, name)
            return name, "forward" if function is None else "recompute"
        return ("", "forward") if function is None else (self._made_by.get(function._sequence_nr(), ""), "backward")


# Modules beyond this number are left out.
_MOST_ROWS = 50_000


def rows_of(
    models: Iterable[Any], flops: Mapping[tuple[str, str], int], moved: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the rows of the table "modules", in the order of the names. Wrappers have no rows of their own.

    `flops` has the FLOPs of a step by a module's name in the trace and part of the step, `moved` the bytes that its
    operators read and write by module; both are empty if they were not counted. A parameter that several modules share
    counts for the first.
    """
    known = list(models)
    names = names_of_all(known)
    bucket_of = _buckets(known)
    own: dict[tuple[str, str], dict[int, list[int]]] = {}
    sharded: set[tuple[str, str]] = set()
    seen: set[int] = set()
    for module in (module for model in known for module in modules_of(model)):
        name = names.get(id(module))
        if name is None or len(own) >= _MOST_ROWS:
            continue
        sizes = own.setdefault(name, defaultdict(lambda: [0, 0]))
        if any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__):
            sharded.add(name)
        for parameter in parameters_of(module, recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                sums = sizes[bucket_of.get(id(parameter), -1)]
                sums[0] += int(parameter.numel())
                sums[1] += int(parameter.numel() * parameter.element_size())
    rows = []
    for (path, kind), sizes in own.items():
        counted = {f"{part}_flops": flops.get((named(path, kind), part), 0) if flops else -1 for part in PARTS}
        counted["moved_bytes"] = moved.get(named(path, kind), 0) if moved else -1
        for bucket, (count, size) in sorted(sizes.items()) or [(-1, [0, 0])]:
            row = {"path": path, "kind": kind, "parameters": count, "parameter_bytes": size, "bucket": bucket}
            rows.append(row | counted | {"sharded": int((path, kind) in sharded)})
            counted = dict.fromkeys(counted, 0)  # once for the module, not for each bucket
    return rows


def _buckets(models: Iterable[Any]) -> dict[int, int]:
    """Return the position of each parameter's bucket in the order in which DistributedDataParallel reduces them."""
    found: dict[int, int] = {}
    for module in (module for model in models for module in modules_of(model)):
        if type(module).__name__ != "DistributedDataParallel":
            continue
        reduced = [p for p in module._module_parameters if p.requires_grad]
        for place, bucket in enumerate(_numbers(module, reduced)):
            found |= {id(reduced[number]): place for number in bucket if number < len(reduced)}
    return found


def _numbers(module: Any, reduced: Sequence[Any]) -> list[list[int]]:
    """Return the numbers of the parameters in each bucket; [] if they are unknown.

    DistributedDataParallel rebuilds its buckets after its first backward pass, in the order in which gradients arrived,
    and logs their parameters. If it searches for unused parameters, it keeps the first buckets and logs their sizes:
    parameters of one data type fill them in order, starting with the last.
    """
    logged = module._get_ddp_logging_data()
    anew = str(logged.get("rebuilt_per_bucket_param_indices") or "")
    if anew or not module.find_unused_parameters or module.static_graph:
        return [[int(number) for number in bucket.split() if number.isdigit()] for bucket in anew.split(",")]
    found, left = [], list(range(len(reduced)))
    for size in str(logged.get("bucket_sizes") or "").split(","):
        bucket: list[int] = []
        filled = 0
        while left and size.strip().isdigit() and filled < int(size):
            bucket.append(left.pop())
            filled += int(reduced[bucket[-1]].numel() * reduced[bucket[-1]].element_size())
        if not bucket or filled != int(size):
            return []
        found.append(bucket)
    return [] if left else found
