"""Reads run.json and facts.json: what a run, and what one of its ranks, say of themselves.

What the shapes below declare can be relied on behind this reader: it has that type, or it is None or absent. What they
do not declare, as a later dlprof writes it, passes where it is plain. A fact of another kind is left out with a word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlprof.errors import DlprofError
from dlprof.read.opening import read_file
from dlprof.read.sources import Reading

# A type; a list of what its one item is; a mapping of names to shapes. None stands for an unknown value of any shape.
Shape = type | list["Shape"] | Mapping[str, "Shape"]

TASK: Mapping[str, Shape] = {
    "host": str,
    "number": str,
    "command": [str],
    "start_ns": int,
    "end_ns": int,
    "exit": {"code": int, "signal": int},
    "resumed_ns": [int],
    "warnings": [str],
}

RUN: Mapping[str, Shape] = {
    "dlprof": str,
    "command": [str],
    "start_ns": int,
    "end_ns": int,
    "hosts": [str],
    "exit": {"code": int, "signal": int},
    "options": {},
    "resumed_ns": [int],
    "warnings": [str],
    "tasks": [TASK],
}

RANK: Mapping[str, Shape] = {
    "rank": int,
    "local_rank": int,
    "world_size": int,
    "backend": str,
    "host": str,
    "boot": str,
    "pid": int,
    "restart": int,
    "env": {},
    "script": str,
    "argv": [str],
    "clock": {"unix_ns": int, "perf_ns": int},
    "device": {
        "type": str,
        "index": int,
        "name": str,
        "uuid": str,
        "pci": str,
        "slice": str,
        "vendor": str,
        "memory_bytes": int,
        "capability": [int],
        "count": int,
    },
    "versions": {},
    "cpu": {"count": int, "affinity": int, "quota": float, "torch_threads": int, "torch_interop_threads": int},
    "loaders": [
        {
            "role": str,
            "num_workers": int,
            "batch_size": int,
            "pin_memory": bool,
            "prefetch_factor": int,
            "persistent_workers": bool,
            "start_method": str,
            "dataset": str,
            "dataset_length": int,
        }
    ],
    "models": [{"class": str, "parameters": int, "parameter_bytes": int, "dtypes": {}, "compiled": bool, "ddp": {}}],
    "optimizers": [{"class": str, "fused": bool, "foreach": bool, "parameters": int, "parameter_groups": int}],
    "autocast": {"enabled": bool, "dtype": str},
    "grad_scaler": bool,
    "graphs": int,
    "matmul": {},
    "flops": {
        "state": str,
        "why": str,
        "step": int,
        "total": int,
        "backward": int,
        "operators": [{"operator": str, "dtype": str, "flops": int, "calls": int}],
        "shapes": [{"operator": str, "dtype": str, "shape": str, "calls": int, "flops": int, "bytes": int}],
        "uncounted": {},
    },
    "step": {"mark": str},
    "window": {
        "state": str,
        "skip": int,
        "warmup": int,
        "active": int,
        "first_step": int,
        "last_step": int,
        "export_ns": int,
        "extended": int,
        "cupti_torn_down": bool,
        "errors": [str],
    },
    "warnings": [str],
}

_LARGEST = 2**62
# Undeclared facts are no deeper than this.
_DEEPEST = 3
_MOST_NAMED = 6


def read(path: Path) -> Reading:
    """Return the facts of a rank from its facts.json; raise DlprofError where it cannot be read or holds no object."""
    return _read(path, RANK)


def read_run(path: Path) -> Reading:
    """Return the facts of a run from its run.json; raise DlprofError where it cannot be read or holds no object."""
    return _read(path, RUN)


def read_task(path: Path) -> Reading:
    """Return what one task of a job said of itself; raise DlprofError where it cannot be read or holds no object."""
    return _read(path, TASK)


def _read(path: Path, shape: Mapping[str, Shape]) -> Reading:
    try:
        data = json.loads(read_file(path))
    except (ValueError, RecursionError) as e:
        raise DlprofError(f"{path.name} is broken ({str(e)[:120]})") from None
    if not isinstance(data, dict):
        raise DlprofError(f"{path.name} is broken (it holds no object)")
    left_out: list[str] = []
    facts = _fitting(shape, data, "", left_out)
    if not left_out:
        return Reading({}, facts)
    few = ", ".join(left_out[:_MOST_NAMED]) + (" …" if len(left_out) > _MOST_NAMED else "")
    return Reading({}, facts, (f"{path.name}: left out, since they are not of the kind expected: {few}",))


def _fitting(shape: Mapping[str, Shape], data: Mapping[str, Any], where: str, left_out: list[str]) -> dict[str, Any]:
    """Return the entries of data that fit; name the others in left_out."""
    fitting = {}
    for name, value in data.items():
        at = f"{where}{name}"[:80]
        if name not in shape:
            if _is_plain(value, _DEEPEST):
                fitting[name] = value
            else:
                left_out.append(at)
            continue
        fits, kept = _fit(shape[name], value, at, left_out)
        if value is None or fits:
            fitting[name] = kept
        else:
            left_out.append(at)
    return fitting


def _fit(shape: Shape, value: Any, where: str, left_out: list[str]) -> tuple[bool, Any]:
    """Return whether a value is of a shape, and give what of it is."""
    if isinstance(shape, type):
        # bool is an int to Python, and a number of workers is none.
        fits = type(value) is shape
        if isinstance(value, int):
            fits = fits and 0 <= value <= _LARGEST
        return fits, value if fits else None
    if isinstance(shape, list):
        if not isinstance(value, list):
            return False, None
        items = [_fit(shape[0], item, f"{where}[{i}]", left_out) for i, item in enumerate(value)]
        left_out += [f"{where}[{i}]" for i, (fits, _) in enumerate(items) if not fits]
        return True, [item for fits, item in items if fits]
    if not isinstance(value, dict):
        return False, None
    return True, _fitting(shape, value, f"{where}.", left_out)


def _is_plain(value: Any, depth: int) -> bool:
    """Return whether a value is text, a finite number, a truth value, none, or a shallow collection of them."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(v, depth - 1) for v in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(v, depth - 1) for v in value)
    return True
