"""The tree of a model's modules: the parameters of each, and the bucket that exchanges their gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dlprof.record.model.names import PARTS, modules_of, named, names_of_all, parameters_of

# Modules beyond this number are left out.
_MOST = 50_000


def rows_of(
    models: Iterable[Any], flops: Mapping[tuple[str, str], int], moved: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the rows of the table "modules", in the order of the names. What wraps a module is no module of its own.

    `flops`: what a step computes, by a module's name in the trace and part of the step; `moved`: the bytes that its
    operators read and write, by module; empty: it was not counted.

    A parameter that several modules share is the first one's.
    """
    known = list(models)
    names = names_of_all(known)
    bucket_of = _buckets(known)
    own: dict[tuple[str, str], dict[int, list[int]]] = {}
    sharded: set[tuple[str, str]] = set()
    seen: set[int] = set()
    for module in (module for model in known for module in modules_of(model)):
        name = names.get(id(module))
        if name is None or len(own) >= _MOST:
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
            counted = dict.fromkeys(counted, 0)  # of the module, and not of each bucket
    return rows


def _buckets(models: Iterable[Any]) -> dict[int, int]:
    """Return the place of each parameter's bucket in the order in which DistributedDataParallel reduces them."""
    found: dict[int, int] = {}
    for module in (module for model in models for module in modules_of(model)):
        if type(module).__name__ != "DistributedDataParallel":
            continue
        reduced = [p for p in module._module_parameters if p.requires_grad]
        for place, bucket in enumerate(_numbers(module, reduced)):
            found |= {id(reduced[number]): place for number in bucket if number < len(reduced)}
    return found


def _numbers(module: Any, reduced: Sequence[Any]) -> list[list[int]]:
    """Return the numbers of the parameters in each bucket; [] where they are not known.

    DistributedDataParallel makes its buckets anew after its first backward pass, in the order in which gradients are
    there, and tells which parameters are in them. Where it looks for unused ones it keeps the first buckets, and tells
    their sizes: they are filled from the last parameter on, of one data type in their order.
    """
    told = module._get_ddp_logging_data()
    anew = str(told.get("rebuilt_per_bucket_param_indices") or "")
    if anew or not module.find_unused_parameters or module.static_graph:
        return [[int(number) for number in bucket.split() if number.isdigit()] for bucket in anew.split(",")]
    found, left = [], list(range(len(reduced)))
    for size in str(told.get("bucket_sizes") or "").split(","):
        bucket: list[int] = []
        held = 0
        while left and size.strip().isdigit() and held < int(size):
            bucket.append(left.pop())
            held += int(reduced[bucket[-1]].numel() * reduced[bucket[-1]].element_size())
        if not bucket or held != int(size):
            return []
        found.append(bucket)
    return [] if left else found
