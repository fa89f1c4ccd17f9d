"""Reads stalls.jsonl: one JSON object a stall, appended as the job runs; the last line may be half."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import pandas as pd

from dlprof import tables
from dlprof.errors import DlprofError
from dlprof.readers import Reading
from dlprof.readers.chunks import open_file

_READ_BYTES = 4 << 20

_Told = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Stall(msgspec.Struct, gc=False):
    """A line. Other keys, of a later dlprof, are passed over."""

    kind: str
    start_ns: _Told
    dur_ns: _Told
    step: _Told
    generation: _Told | None = None
    path: str | None = None
    phase: str = "rest"


def read(path: Path) -> Reading:
    """Give the table "stalls", in order of time. A cut last line is dropped, as are other bad ones, with a warning.

    A file of no lines is a job that nothing stalled. Raises DlprofError where the file cannot be read or holds lines
    and none of them is a stall.
    """
    decode = msgspec.json.Decoder(_Stall).decode
    stalls: list[_Stall] = []
    bad = 0
    last_is_bad = False
    with open_file(path) as file:
        while lines := file.readlines(_READ_BYTES):
            for line in lines:
                if not line.strip():
                    continue
                last_is_bad = False
                try:
                    stalls.append(decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    bad += 1
                    last_is_bad = True
    if bad > 1 and not stalls:
        raise DlprofError(f"{path}: not a log of stalls: none of its lines is one")
    lost = bad - last_is_bad
    warnings = (f"{path.name}: {lost:,} lines are no stalls and are left out",) if lost else ()
    return Reading({"stalls": _table(stalls)}, {}, warnings)


def _table(stalls: list[_Stall]) -> pd.DataFrame:
    if not stalls:
        return tables.empty("stalls")
    frame = pd.DataFrame(
        {
            "kind": pd.Categorical([s.kind for s in stalls]),
            "start_ns": [s.start_ns for s in stalls],
            "dur_ns": [s.dur_ns for s in stalls],
            "step": [s.step for s in stalls],
            "generation": [-1 if s.generation is None else s.generation for s in stalls],
            "path": pd.Categorical([s.path or "" for s in stalls]),
            "phase": pd.Categorical([s.phase for s in stalls]),
        }
    )
    return tables.check("stalls", frame.sort_values("start_ns", kind="stable", ignore_index=True))
