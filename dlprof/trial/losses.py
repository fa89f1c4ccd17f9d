"""Whether a change leaves the losses of a job as they are: step by step, on all ranks, from the same seed.

What a change may differ by is measured: two runs without it, of different seeds, say how far apart losses may be.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dlprof import run_folder
from dlprof.overrides import Value
from dlprof.trial.measuring import Steps
from dlprof.trial.running import QUICK, Runner

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
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                found[path.parent.name, int(row["step"])] = float(row["loss"])
    return found


@dataclass
class Comparison:
    """Compares the losses with settings to those of the job without, running it by a copy of a trial's runner.

    As far as edits make the settings, the run has these, so that they are tested, too.
    """

    runner: Runner
    _plain: list[Losses] = field(default_factory=list)  # of two seeds

    def __call__(self, settings: Mapping[str, Value], limit_s: float) -> Verdict:
        """Return the verdict; "" if a run fails, or there is no time for all of them."""
        until = time.monotonic() + limit_s
        for seed in range(len(self._plain), 2):
            if (found := self._losses({}, seed, until)) is None:
                return ""
            self._plain.append(found)
        changed = self._losses(settings, 0, until)
        return "" if changed is None else compared(self._plain[0], changed, self._plain[1])

    def _losses(self, settings: Mapping[str, Value], seed: int, until: float) -> Losses | None:
        folder = self.runner.folder / "losses"
        folder.mkdir(exist_ok=True)
        kept = folder / "kept"
        recording = (*QUICK, "--losses", str(seed))
        once = replace(
            self.runner, folder=folder, recording=recording, keep=kept, may_be_the_same=True, edits=self.runner.copy
        )
        try:
            done = once(settings, max(until - time.monotonic(), 0.0))
            return losses_of(kept) if isinstance(done, Steps) else None
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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
