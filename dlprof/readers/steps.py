"""Reads steps.jsonl, the light layer: one JSON object a step, appended as the job runs; the last line may be half."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pandas as pd

from dlprof import tables
from dlprof.errors import DlprofError
from dlprof.readers import Reading
from dlprof.readers.chunks import open_file

_READ_BYTES = 4 << 20
_REQUIRED = ("step", "start_ns", "dur_ns")

_Told = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Measured = Annotated[int, msgspec.Meta(ge=-1, le=2**62)]

# The declared columns; what a line leaves out was not measured. Other keys, of a later dlprof, are passed over.
_Step = msgspec.defstruct(
    "_Step",
    [
        (name, _Told)
        if name in _REQUIRED
        else (name, str, "other")
        if dtype == tables.CATEGORY
        else (name, _Measured, -1)
        for name, dtype in sorted(tables.STEPS.items(), key=lambda column: column[0] not in _REQUIRED)
    ],
    gc=False,
)


def read(path: Path) -> Reading:
    """Give the table "steps", in order of time. A cut last line is dropped, as are other bad ones, with a warning.

    Raises DlprofError where the file cannot be read or holds lines and none of them is a step.
    """
    decode = msgspec.json.Decoder(_Step).decode
    columns: dict[str, list[Any]] = {name: [] for name in tables.STEPS}
    count = bad = 0
    last_is_bad = False
    with open_file(path) as file:
        while lines := file.readlines(_READ_BYTES):
            steps = []
            for line in lines:
                if not line.strip():
                    continue
                last_is_bad = False
                try:
                    steps.append(decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    bad += 1
                    last_is_bad = True
            count += len(steps)
            for name, dtype in tables.STEPS.items():
                values = [getattr(step, name) for step in steps]
                columns[name].append(values if dtype == tables.CATEGORY else np.array(values, dtype=np.int64))
    if bad > 1 and not count:
        raise DlprofError(f"{path}: not a log of steps: none of its lines is one")
    frame = pd.DataFrame(
        {
            name: pd.Categorical([text for part in columns[name] for text in part])
            if dtype == tables.CATEGORY
            else np.concatenate([np.empty(0, dtype=np.int64), *columns[name]])
            for name, dtype in tables.STEPS.items()
        }
    )
    frame = frame.sort_values(["start_ns", "step"], ignore_index=True) if count else tables.empty("steps")
    warnings = []
    if lost := bad - last_is_bad:
        warnings.append(f"{path.name}: {lost:,} lines are no steps and are left out")
    if not count:
        warnings.append(f"{path.name}: holds no steps")
    return Reading({"steps": tables.check("steps", frame)}, {}, tuple(warnings))
