"""What a script's model consists of, and the names of its modules: as in `named_modules`, without wrappers.

Which module an operator belongs to while it runs, also in the backward pass, where no module is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
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


# What methods of the script's own classes have raised, by their name, until it is told.
problems: dict[str, str] = {}


def modules_of(model: Any) -> list[Any]:
    """Return a model and what it consists of, as its own modules() says or, where that fails, as torch has it."""
    if (said := _asked(model, "modules")) is not None:
        return said
    found = {id(model): model}
    for module in (modules := [model]):
        new = {id(one): one for one in _registered(module, "_modules").values() if one is not None}
        modules += [one for key, one in new.items() if key not in found]
        found |= new
    return modules


def parameters_of(model: Any, *, recurse: bool = True) -> list[Any]:
    """Return the parameters of a model, as its own parameters() says or, where that fails, as torch has them."""
    if (said := _asked(model, "parameters", recurse=recurse)) is not None:
        return said
    modules = modules_of(model) if recurse else [model]
    every = (one for module in modules for one in _registered(module, "_parameters").values())
    return list({id(one): one for one in every if one is not None}.values())


def _children_of(module: Any) -> list[tuple[str, Any]]:
    if (said := _asked(module, "named_children")) is not None:
        return said
    return [(name, one) for name, one in _registered(module, "_modules").items() if one is not None]


def _asked(module: Any, method: str, **options: Any) -> list[Any] | None:
    try:
        return list(getattr(module, method)(**options))
    except Exception as e:  # noqa: BLE001 - the script's own class
        if method not in problems:
            problems[method] = f"{type(module).__name__}.{method}() fails ({words_of(e)}): read as torch has it instead"
        return None


def _registered(module: Any, name: str) -> dict[str, Any]:
    """Return the modules or parameters that torch keeps for a module, without a call of the script's code."""
    return object.__getattribute__(module, "__dict__").get(name) or {}


def names_of(model: Any) -> dict[int, tuple[str, str]]:
    """Return path ("": the model itself) and class of each module of a model, by id.

    A wrapper has the name of what it wraps. A module that is reached by several paths has the first one. FSDP2 makes a
    class of its own of each module: that counts as the script's.
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
        children = [(child, f"{path}.{name}" if path else name) for name, child in _children_of(module)]
        open_modules.extend(reversed(children))
    return names


def names_of_all(models: Iterable[Any]) -> dict[int, tuple[str, str]]:
    """Return the same of several models; what lies within another one has its path there.

    The only one is "". Where there are several, as a generator and a discriminator, their paths begin with their
    classes in brackets; a second one of the same class has a number.
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
    """Return names with paths that begin with a name in brackets: of what is not the model, as a loss."""
    return {one: (f"({root}).{path}" if path else f"({root})", kind) for one, (path, kind) in names.items()}


def named(path: str, kind: str) -> str:
    """Return what a module is called in a trace."""
    return f"nn.Module: {path} ({kind})"


def class_of(module: Any) -> str:
    """Return the class of the script's own module: of a wrapper, of what it wraps."""
    while (kept := wrapped(module)) is not None:
        module = kept
    kind = type(module)
    sharded = kind.__name__.startswith("FSDP") and len(kind.__mro__) > 2 and kind.__mro__[1].__name__ == "FSDPModule"
    return str(kind.__mro__[2].__name__ if sharded else kind.__name__)


def wrapped(module: Any) -> Any:
    """Return the module that a wrapper wraps; None: it is none."""
    name = _WRAPPERS.get(type(module).__name__)
    return None if name is None else getattr(module, name, None)


# The parts of a step in which modules compute.
PARTS = ("forward", "recompute", "backward")


# A step of a model with more functions is counted without their modules.
_MOST = 200_000


class Functions:
    """Remembers which module created which function of the backward pass, by autograd's sequence numbers."""

    def __init__(self, inner: Callable[[], str]) -> None:
        import torch

        autograd: Any = torch.autograd
        self._inner = inner
        # Neither is in PyTorch's documentation; it is then not known which module a backward pass is of.
        self._next: Callable[[], int] | None = getattr(autograd, "_get_sequence_nr", None)
        self._running: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
        self._made_by: dict[int, str] = {}

    def module(self) -> tuple[str, str]:
        """Return the module whose operator runs now, "" where it is of none, and forward, recompute or backward."""
        name, function = self._inner(), self._running()
        if name:
            if self._next is not None and len(self._made_by) < _MOST:
                # An operator's function was made before it comes by a dispatch mode. Operators that make none, as
                # those that count batches, may come by after it in other modules.
                self._made_by.setdefault(self._next() - 1, name)
            return name, "forward" if function is None else "recompute"
        return ("", "forward") if function is None else (self._made_by.get(function._sequence_nr(), ""), "backward")
