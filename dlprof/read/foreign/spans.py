"""Makes the table "spans" of columns that name only what a format knows; all else is unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dlprof import schema

_UNKNOWN: Mapping[str, Any] = {"category": "", "int64": -1}


def spans_of(columns: Mapping[str, Sequence[Any] | np.ndarray[Any, Any]]) -> pd.DataFrame:
    """Return the table, in order of start, the longer first, of at least lane, kind, name, start_ns and dur_ns."""
    count = len(columns["start_ns"])
    start = np.asarray(columns["start_ns"], dtype=np.int64)
    order = np.lexsort((-np.asarray(columns["dur_ns"], dtype=np.int64), start))
    made: dict[str, Any] = {}
    for name, dtype in schema.SPANS.items():
        values = columns.get(name)
        if dtype == schema.CATEGORY:
            texts = [""] * count if values is None else [str(value) for value in values]
            made[name] = pd.Series(pd.Categorical([texts[i] for i in order.tolist()]))
        else:
            given = np.full(count, _UNKNOWN[dtype]) if values is None else np.asarray(values, dtype=np.int64)
            made[name] = pd.Series(given[order])
    return schema.check("spans", pd.DataFrame(made))
