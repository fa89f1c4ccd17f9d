"""Reads the JSON objects that dlprof writes: run.json, facts.json, and those of the logs `held` and `overrides`.

What the shapes below declare can be relied on behind this reader: it has that type, or it is None or absent. What they
do not declare, as a later dlprof writes it, passes where it is plain. Any other value is left out with a warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlprof import overrides
from dlprof.errors import DlprofError
from dlprof.read.limits import MOST_LISTED, MOST_SETTINGS, limit
from dlprof.read.opening import read_object
from dlprof.read.sources import Reading
from dlprof.units import few

# A type; a list with the shape of its items; a mapping of names to shapes. A value None is unknown, for any shape.
Shape = type | list["Shape"] | Mapping[str, "Shape"]


def _all(kind: Shape, names: str) -> Mapping[str, Shape]:
    return dict.fromkeys(names.split(), kind)


_COMMAND: Mapping[str, Shape] = {
    **_all([str], "command warnings"),
    **_all(int, "start_ns end_ns"),
    "exit": _all(int, "code signal"),
    "oom_kills": int,
    "resumed_ns": [int],
}
TASK: Mapping[str, Shape] = {**_COMMAND, **_all(str, "host number")}
RUN: Mapping[str, Shape] = {**_COMMAND, **_all(str, "dlprof batch"), "hosts": [str], "options": {}, "tasks": [TASK]}

_WINDOW: Mapping[str, Shape] = {
    **_all(str, "state asked"),
    **_all(int, "skip warmup active first_step last_step export_ns extended"),
    "cupti_torn_down": bool,
    "errors": [str],
    "modules": _all(int, "ranges ns_each"),
    "theirs": [{**_all(int, "first_step last_step exit_ns"), "shapes": bool}],
}

RANK: Mapping[str, Shape] = {
    **_all(int, "rank local_rank world_size pid restart graphs ended_ns"),
    **_all(str, "backend host boot"),
    **_all({}, "env versions matmul"),
    "launch": _all(str, "batch PMIX_NAMESPACE TORCHELASTIC_RUN_ID MASTER_PORT"),
    **_all([str], "argv warnings untrained"),
    "clock": _all(int, "unix_ns perf_ns"),
    "device": {
        **_all(str, "type name uuid pci slice vendor"),
        **_all(int, "index memory_bytes count node"),
        "capability": [int],
    },
    "alone": bool,
    "failure": _all(str, "type text site"),
    "error": _all(str, "type text site"),
    "cpu": {
        **_all(int, "count affinity memory_limit_bytes torch_threads torch_interop_threads"),
        "quota": float,
        **_all(str, "allowed at_start"),
        "nodes": {},
        "units": [str],
        "onednn": bool,
    },
    "process": {
        **_all(str, "tracer profiler malloc sanitizer"),
        **_all(bool, "tracemalloc development"),
        "nice": int,
        "monitors": [str],
    },
    "loaders": [
        {
            **_all(str, "role start_method dataset"),
            **_all(int, "num_workers batch_size prefetch_factor dataset_length replicas replica data_of"),
            **_all(bool, "pin_memory persistent_workers"),
            "collate": {**_all(str, "name file"), "line": int},
            "objects": [{**_all(str, "class name kind"), "length": int}],
            "transforms": [str],
        }
    ],
    "models": [
        {
            **_all(str, "class attention"),
            **_all(int, "parameters parameter_bytes tensor_parallel"),
            **_all({}, "dtypes ddp"),
            **_all(bool, "compiled fsdp reads_sequences batch_first"),
        }
    ],
    "optimizers": [
        {
            "class": str,
            "takes": [str],
            **_all(bool, "fused foreach"),
            **_all(int, "parameters parameter_groups distinct_groups bytes"),
        }
    ],
    "directory": str,
    "calls": [
        {
            **_all(str, "kind file function source digest via model"),
            **_all(int, "line end_line column end_column count"),
            **_all(bool, "torch whole"),
            "roles": [str],
            "takes": [int],
            "values": {},
        }
    ],
    "files": [_all(str, "file digest")],
    "options": [{**_all(str, "name dest"), **_all(bool, "switch on")}],
    "subnormal": [{"step": int, **_all(float, "parameters state")}],
    "autocast": {"enabled": bool, "dtype": str},
    "grad_scaler": bool,
    "evaluation": _all(int, "steps with_graph"),
    "flops": {
        **_all(str, "state why"),
        **_all(int, "step total backward"),
        "operators": [{**_all(str, "operator dtype"), **_all(int, "flops calls")}],
        "shapes": [{**_all(str, "operator dtype shape"), **_all(int, "calls flops bytes")}],
        "moved": [{**_all(str, "operator dtype device"), **_all(int, "calls bytes")}],
        **_all(int, "chained_bytes fused_bytes"),
        "derivatives": _all(int, "calls outputs"),
        "one_hot": [_all(int, "values classes")],
        "uncounted": {},
        "lines": [
            {**_all(str, "phase after file function source"), **_all(int, "line calls"), "operators": {}, "moved": {}}
        ],
    },
    "step": {"mark": str, "told": bool},
    "padding": [{"step": int, "source": str, "padded": int, "lengths": [int]}],
    "window": _WINDOW,
    "windows": [{**_WINDOW, "number": int, **_all(str, "why trace")}],
}

_LARGEST = 2**62
_DEEPEST = 3  # nesting of values without a declared shape
_MOST_NAMED = 6
_WRONG = object()


def read(path: Path, shape: Mapping[str, Shape] = RANK, begins: str = "") -> Reading:
    """Return the facts in a file; raise DlprofError if it cannot be read or holds no object."""
    left_out: list[str] = []
    facts = _fitting(shape, read_object(path, begins), "", left_out)
    named = few(left_out, _MOST_NAMED)
    warnings = (f"{path.name}: left out, since they are not of the kind expected: {named}",) if left_out else ()
    return Reading({}, facts, warnings)


def fitting(shape: Mapping[str, Shape], value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parts of an object that fit a shape."""
    fits: Mapping[str, Any] = _fitting(shape, value, "", [])
    return fits


def _fitting(shape: Shape | None, value: Any, where: str, left_out: list[str]) -> Any:
    """Return the parts of a value that fit a shape, _WRONG if none do; add the names of the others to left_out."""
    if shape is None:
        return value if _is_plain(value, _DEEPEST) else _WRONG
    if isinstance(shape, type):
        # In Python a bool is an int, but it is no number of workers.
        fits = type(value) is shape and (not isinstance(value, int) or 0 <= value <= _LARGEST)
        return value if fits else _WRONG
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _WRONG
        parts = [(f"{where}[{i}]", shape[0], part) for i, part in enumerate(value)]
        kept = [_part(*part, left_out) for part in parts]
        return [part for part in kept if part is not _WRONG]
    if not isinstance(value, dict):
        return _WRONG
    entries = {
        name: None if part is None else _part(f"{where}.{name}".lstrip(".")[:80], shape.get(name), part, left_out)
        for name, part in value.items()
    }
    return {name: part for name, part in entries.items() if part is not _WRONG}


def _part(where: str, shape: Shape | None, value: Any, left_out: list[str]) -> Any:
    kept = _fitting(shape, value, where, left_out)
    if kept is _WRONG:
        left_out.append(where)
    return kept


def _is_plain(value: Any, depth: int) -> bool:
    """Return whether a value is text, a finite number, a truth value, none, or a shallow collection of them."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(v, depth - 1) for v in value)
    return True


_MOST_TEXT = 400  # names and numbers are far shorter

# Of the log `held`, beside its rows.
_HELD: Mapping[str, Shape] = {
    "state": str,  # counted, or why nothing was
    "step": int,
    # When a backward pass began and memory was fullest with activations ("backward"), and when the last one had ended
    # ("gradients"): what was there then besides parameters and the optimizer's state, by device.
    "moments": [
        {
            **dict.fromkeys(("moment", "device"), str),
            **dict.fromkeys(("gradient_bytes", "allocated_bytes"), int),
        }
    ],
    "activations": {
        **dict.fromkeys(("state", "why"), str),
        **dict.fromkeys(("graphs", "nodes", "recomputed", "unseen"), int),
        "by_module": bool,
        "unseen_kinds": [str],
    },
    # key: that the state has in the optimizer, or "master" for copies of the parameters
    "optimizers": [
        {"class": str, "state": [{"key": str, "dtype": str, "device": str, "bytes": int, "full_bytes": int}]}
    ],
    "process": {"before_bytes": int, "anonymous_bytes": int},  # of the host: before there was a model, and in the step
    "cost_ns": int,
}


def read_held(path: Path, begins: str = "") -> Reading:
    """Return table "held", and fact "held" with everything but the rows; raise DlprofError as `facts.read` does."""
    import pandas as pd  # which opening a run does not wait for

    from dlprof import schema

    row_shape: Mapping[str, Shape] = {n: str if d == schema.CATEGORY else int for n, d in schema.HELD.items()}
    reading = read(path, {**_HELD, "rows": [row_shape]}, begins)
    about = dict(reading.facts)
    rows = about.pop("rows", None)
    if rows is None:
        raise DlprofError(f"{path.name} is broken (it has no rows)")
    whole = [row for row in rows[: limit(MOST_LISTED)] if all(row.get(name) is not None for name in row_shape)]
    frame = pd.DataFrame(whole, columns=list(row_shape))
    texts = [name for name, kind in row_shape.items() if kind is str]
    frame[texts] = frame[texts].map(lambda text: text[:_MOST_TEXT])
    warnings = list(reading.warnings)
    if odd := len(rows) - len(whole):
        warnings.append(f"{path.name}: {odd:,} rows of another kind, or too many, are left out")
    return Reading({"held": schema.check("held", frame.astype(dict(schema.HELD)))}, {"held": about}, tuple(warnings))


_MOST_APPLIED = 1 << 62


def read_overrides(path: Path, begins: str = "") -> Reading:
    """Return table "overrides"; raises DlprofError if the file cannot be read or holds no object."""
    import pandas as pd

    from dlprof import schema

    data = read_object(path, begins)
    known = {name: entry for name, entry in data.items() if isinstance(entry, dict) and "value" in entry}
    rows = []
    for name, one in list(overrides.outcomes((), [known]).items())[: limit(MOST_SETTINGS)]:
        before = ", ".join(map(str, one.before))
        of_all = (name, str(known[name]["value"]), before, min(one.applied, _MOST_APPLIED))
        for file, line, function in one.places or (("", -1, ""),):
            rows.append((*of_all, file, line, function, one.error or ""))
    frame = pd.DataFrame(rows, columns=list(schema.OVERRIDES))
    texts = [name for name, dtype in schema.OVERRIDES.items() if dtype == schema.CATEGORY]
    frame[texts] = frame[texts].map(lambda text: text[:_MOST_TEXT])
    frame = frame[frame["line"].between(-1, _MOST_APPLIED)].reset_index(drop=True)
    odd = len(data) - len(known)
    warnings = (f"{path.name}: {odd} entries of another kind are left out",) if odd else ()
    return Reading({"overrides": schema.check("overrides", frame.astype(dict(schema.OVERRIDES)))}, {}, warnings)
