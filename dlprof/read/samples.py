"""Readings as the table "samples": one JSON object a line, whose every number but the clocks is a metric."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.kineto.json_stream import NOT_JSON
from dlprof.read.opening import lines_of, most_rows, open_file, too_many

_CLOCKS = ("at_ns", "perf_ns")
_LATEST = 2**62

# A core that computes for more of the time than this has nothing left to give.
_BUSY_PERCENT = 90

Row = dict[str, Any]


def read_samples(path: Path, source: str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return the rows of a sampler's log, and what was lost of it.

    A line without its time is none; a cut last line is dropped, as are other bad ones, with a warning. Raises
    DlprofError where the file cannot be read or none of its lines is a reading.
    """
    decode = msgspec.json.Decoder(Row).decode
    at: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    read = bad = 0
    last_is_bad = many = False
    with open_file(path) as file:
        for text in chain.from_iterable(lines_of(file)):
            if not text.strip():
                continue
            try:
                row = _with_cores(decode(text))
                when = row["at_ns"]
            except (*NOT_JSON, KeyError, TypeError):
                bad += 1
                last_is_bad = True
                continue
            last_is_bad = type(when) is not int or not 0 <= when <= _LATEST
            if last_is_bad:
                bad += 1
                continue
            read += 1
            if read > most_rows():
                many = True
                break
            for metric, value in row.items():
                if type(value) in (int, float) and metric not in _CLOCKS and math.isfinite(value):
                    at.setdefault(metric, []).append(when)
                    values.setdefault(metric, []).append(value)
    if bad > 1 and not read:
        raise DlprofError(f"{path}: not a log of samples: none of its lines is one")
    lost = bad - last_is_bad
    warnings = [f"{path.name}: {lost:,} lines are no samples and are left out"] if lost else []
    warnings += [too_many(path, "samples")] if many else []
    return frame(source, at, values), tuple(warnings)


def _with_cores(row: Row) -> Row:
    """Add what a table can hold of a host's cores: how many there are, are in use and are busy, and the busiest one."""
    cores = row.get("core_percent")
    if not cores:
        return row
    return row | {
        "cores": len(cores),
        "cpu_cores": sum(cores) / 100,
        "busy_cores": sum(core > _BUSY_PERCENT for core in cores),
        "busiest_core_share": max(cores) / 100,
    }


def frame(source: str, at: dict[str, list[int]], values: dict[str, list[float]]) -> pd.DataFrame:
    """Return the table of a source's metrics: of each, when it was read and what it was."""
    if not at:
        return schema.empty("samples")
    metrics = list(at)
    counts = [len(at[metric]) for metric in metrics]
    made = pd.DataFrame(
        {
            "source": pd.Categorical.from_codes(np.zeros(sum(counts), dtype=np.int8), pd.Index([source])),
            "metric": pd.Categorical.from_codes(np.repeat(np.arange(len(metrics)), counts), pd.Index(metrics)),
            "at_ns": np.concatenate([np.array(at[metric], dtype=np.int64) for metric in metrics]),
            "value": np.concatenate([np.array(values[metric], dtype=np.float64) for metric in metrics]),
        }
    )
    return schema.check("samples", made)
