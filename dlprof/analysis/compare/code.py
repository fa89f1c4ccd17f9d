"""Where the program of two runs differs, by the copies of the script's own files in their recordings.

Apart from comparison.py, as a report may know a comparison, and no recording.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from pathlib import Path

from dlprof.analysis.compare.comparison import differing
from dlprof.analysis.source.kept import kept
from dlprof.result import Result
from dlprof.units import few

_MOST = 4  # files, and ranges of a file, that are named
_WORD = re.compile(r"\w+")


def changed(a: Result, b: Result, a_path: Path, b_path: Path) -> tuple[str, ...]:
    """Return the lines of B's files that differ from A's, as "train.py:40-42, 60"; () where a run keeps no files.

    Those are left out by which a setting was changed that differs, or what a finding of A's names. So are comments and
    strings, which no recording keeps. Raises DlprofError if a copy is broken.
    """
    of_a, of_b = kept(a_path), kept(b_path)
    # The script comes first; it may have another name.
    pairs = [*zip(list(of_a)[:1], list(of_b)[:1], strict=False), *((name, name) for name in of_a if name in of_b)]
    names = {s.name.rpartition(".")[2].replace(" ", "_") for s in differing(a, b)[0]}
    names |= {s.name for o in a.found for change in o.changes for s in change.settings}
    places = [p for o in a.found for p in (*o.where, *(change.at for change in o.changes if change.at))]
    found = []
    for name, other in dict.fromkeys(pairs):
        lines = {place.line for place in places if place.file == name}
        if ranges := _ranges(of_a[name].splitlines(), of_b[other].splitlines(), names, lines):
            found.append(f"{other}:{few(ranges, _MOST)}")
    return (*found[:_MOST], *([f"{len(found) - _MOST} more files"] if len(found) > _MOST else []))


def _ranges(a: list[str], b: list[str], names: set[str], places: set[int]) -> list[str]:
    """Return the lines of B that differ, but for those that name such a setting, or are at such a line of A."""
    a, b = ([line.strip() for line in lines] for lines in (a, b))
    found = []
    for code, i, i_end, j, j_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        lines = [line for line in (*a[i:i_end], *b[j:j_end]) if line]
        named = all(names.intersection(_WORD.findall(line)) for line in lines)
        if code != "equal" and not named and not places.intersection(range(i, max(i_end, i + 1) + 1)):
            first, last = j + 1, max(j_end, j + 1)
            found.append(f"{first}–{last}" if last > first else f"{first}")
    return found
