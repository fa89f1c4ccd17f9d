"""Reads held.json: what a rank's memory held in one step, and how that was counted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read import facts
from dlprof.read.limits import MOST_LISTED, limit
from dlprof.read.sources import Reading

_MOST_TEXT = 400  # names and numbers are far shorter

_ROW: Mapping[str, facts.Shape] = {n: str if d == schema.CATEGORY else int for n, d in schema.HELD.items()}

_HELD: Mapping[str, facts.Shape] = {
    "rows": [_ROW],
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


def read(path: Path) -> Reading:
    """Return table "held", and fact "held" with everything but the rows; raise DlprofError as `facts.read` does."""
    reading = facts.read(path, _HELD)
    about = dict(reading.facts)
    rows = about.pop("rows", None)
    if rows is None:
        raise DlprofError(f"{path.name} is broken (it has no rows)")
    whole = [row for row in rows[: limit(MOST_LISTED)] if all(row.get(name) is not None for name in _ROW)]
    frame = pd.DataFrame({name: [_short(row[name]) for row in whole] for name in _ROW})
    warnings = list(reading.warnings)
    if odd := len(rows) - len(whole):
        warnings.append(f"{path.name}: {odd:,} rows of another kind, or too many, are left out")
    return Reading({"held": schema.check("held", frame.astype(dict(schema.HELD)))}, {"held": about}, tuple(warnings))


def _short(value: Any) -> Any:
    return value[:_MOST_TEXT] if isinstance(value, str) else value
