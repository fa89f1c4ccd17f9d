"""Reads lines.jsonl: the line counts of the named functions, by process of a rank, in pieces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import pandas as pd

from dlprof import schema
from dlprof.read.logs import Log
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
    """Return table "lines"; raises DlprofError if the file cannot be read or holds lines but no valid one."""
    hits: Counter[tuple[str, str, str, int]] = Counter()
    took: Counter[tuple[str, str, str, int]] = Counter()
    texts: dict[tuple[str, str], dict[int, str]] = {}
    log = Log(path, "lines", msgspec.json.Decoder(_Piece).decode)
    for pieces in log:
        for piece in pieces:
            if piece.source:
                numbered = dict(enumerate(piece.source.splitlines(), piece.first))
                texts.setdefault((piece.function, piece.file), numbered)
            for line, n, ns in piece.lines:
                hits[piece.role, piece.function, piece.file, line] += n
                took[piece.role, piece.function, piece.file, line] += ns
    for role, function, name in {key[:3] for key in hits}:
        for line in texts.get((function, name), ()):
            hits[role, function, name, line] += 0
    keys = sorted(key for key in hits if max(hits[key], took[key]) < 1 << 63)
    counted = [(*key, hits[key], took[key], texts.get(key[1:3], {}).get(key[3], "")) for key in keys]
    frame = pd.DataFrame(counted, columns=list(schema.LINES)).astype(dict(schema.LINES))
    return Reading({"lines": schema.check("lines", frame)}, {}, log.warnings)
