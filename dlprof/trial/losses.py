"""Whether a change leaves the losses of a job as they are: step by step, on all ranks, from the same seed.

What a change may differ by is measured: two runs without it, of different seeds, say how far apart losses may be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from dlprof import run_folder

FILE = "losses.jsonl"
LEAST = 8  # steps that both runs must have

# Of two pairs of runs that differ by the seed alone, one is no more than so many times as far apart as the other.
MARGIN = 1.5

Losses = Mapping[tuple[str, int], float]
Verdict = Literal["", "equal", "within", "differ"]


def losses_of(run: Path) -> Losses:
    """Return the losses of a run folder by rank and step; what cannot be read is left out."""
    found: dict[tuple[str, int], float] = {}
    for path in run_folder.of_ranks(run_folder.in_ranks(run), FILE):
        for line in path.read_bytes().splitlines():
            try:
                row = json.loads(line)
                found[path.parent.name, int(row["step"])] = float(row["loss"])
            except (ValueError, TypeError, KeyError):
                continue
    return found


def compared(plain: Losses, changed: Losses, other_seed: Losses) -> Verdict:
    """Compare losses without and with a change by those of a run without it and with another seed; "": too few."""
    common = plain.keys() & changed.keys()
    if len(common) < LEAST:
        return ""
    pairs = [(plain[key], changed[key]) for key in common]
    if all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs):
        return "equal"
    seeds = _apart([(plain[key], other_seed[key]) for key in common & other_seed.keys()])
    return "within" if _apart(pairs) <= MARGIN * seeds else "differ"


def _apart(pairs: list[tuple[float, float]]) -> float:
    """Return how far apart losses are: the root of the mean square."""
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in pairs) / len(pairs)) if pairs else 0.0
