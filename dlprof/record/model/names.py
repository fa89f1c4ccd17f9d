"""Names modules by their path in the script's model, as in `named_modules`, without wrappers of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

# Wrappers of PyTorch and others, and the attribute that holds the wrapped module.
_WRAPPERS = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


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
        children = [(child, f"{path}.{name}" if path else name) for name, child in module.named_children()]
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
