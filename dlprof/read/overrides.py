"""Reads overrides.json: which settings of `--set` took effect in a rank, where, and what was there before."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from dlprof import overrides, schema
from dlprof.read.limits import MOST_SETTINGS, limit
from dlprof.read.opening import read_object
from dlprof.read.sources import Reading

_MOST_TEXT = 400  # characters of a text; longer ones are cut
_MOST_APPLIED = 1 << 62


def read(path: Path) -> Reading:
    """Return table "overrides"; raises DlprofError if the file cannot be read or holds no object."""
    data = read_object(path)
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
