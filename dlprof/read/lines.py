"""Reads lines.jsonl: what each process of a rank counted of the named functions, piece by piece."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.kineto.json_stream import NOT_JSON
from dlprof.read.opening import lines_of, open_file
from dlprof.read.sources import Reading

# Sums of a thousand of them still fit into 64 bits.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class _Piece(msgspec.Struct):
    role: str
    function: str
    file: str
    first: _Count
    lines: list[tuple[_Count, _Count, _Count]]  # line, hits, ns
    source: str | None = None


def read(path: Path) -> Reading:
    """Return table "lines"; raises DlprofError where the file cannot be read or holds lines and none of them counts.

    A cut last line is dropped; other bad ones with a warning.
    """
    decode = msgspec.json.Decoder(_Piece).decode
    hits: Counter[tuple[str, str, str, int]] = Counter()
    took: Counter[tuple[str, str, str, int]] = Counter()
    texts: dict[tuple[str, str], dict[int, str]] = {}
    count = bad = 0
    last_is_bad = False
    with open_file(path) as file:
        for read_lines in lines_of(file):
            for text in read_lines:
                last_is_bad = False
                try:
                    piece = decode(text)
                except NOT_JSON:
                    bad += 1
                    last_is_bad = True
                    continue
                count += 1
                if piece.source:
                    numbered = dict(enumerate(piece.source.splitlines(), piece.first))
                    texts.setdefault((piece.function, piece.file), numbered)
                for line, n, ns in piece.lines:
                    hits[piece.role, piece.function, piece.file, line] += n
                    took[piece.role, piece.function, piece.file, line] += ns
    if bad > 1 and not count:
        raise DlprofError(f"{path}: not a log of lines: none of its lines is one")
    for role, function, name in {key[:3] for key in hits}:
        for line in texts.get((function, name), ()):
            hits[role, function, name, line] += 0
    keys = sorted(key for key in hits if max(hits[key], took[key]) < 1 << 63)
    if not keys:
        return Reading({"lines": schema.empty("lines")}, {})
    frame = pd.DataFrame(
        {
            "role": pd.Categorical([key[0] for key in keys]),
            "function": pd.Categorical([key[1] for key in keys]),
            "file": pd.Categorical([key[2] for key in keys]),
            "line": np.array([key[3] for key in keys], dtype="int64"),
            "hits": np.array([hits[key] for key in keys], dtype="int64"),
            "dur_ns": np.array([took[key] for key in keys], dtype="int64"),
            "source": pd.Categorical([texts.get(key[1:3], {}).get(key[3], "") for key in keys]),
        }
    )
    lost = bad - last_is_bad
    warnings = (f"{path.name}: {lost:,} lines are no counts and are left out",) if lost else ()
    return Reading({"lines": schema.check("lines", frame)}, {}, warnings)
