"""Whether a change leaves the losses of a job as they are: step by step, on all ranks, from the same seed.

What a change may differ by is measured: two runs without it, of other seeds, say how far apart chance brings losses.
Where these are equal, since the script sets the seed, the differences from one step to the next say it.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dlprof import run_folder
from dlprof.overrides import Value
from dlprof.trial.running import QUICK, Failed, Runner

FILE = "losses.jsonl"
LEAST, MOST = 8, 100  # losses of a rank: that both runs must have, and that are compared

# Of two pairs of runs that differ by the seed alone, one is no more than so many times as far apart as the other.
MARGIN = 1.5

# The mean difference of so many losses is no further from 0 than so many times its standard error.
SURE = 3.0

Losses = Mapping[tuple[str, int], float]  # of a rank, in their order
Verdict = Literal["", "equal", "within", "differ"]


def losses_of(run: Path) -> Losses:
    """Return the losses of a run folder by rank and step; what cannot be read is left out."""
    found: dict[tuple[str, int], float] = {}
    for path in run_folder.of_ranks(run_folder.in_ranks(run), FILE):
        for n, line in enumerate(path.read_bytes().splitlines()[:MOST]):
            with suppress(ValueError, TypeError, KeyError):
                loss = json.loads(line)["loss"]
                found[path.parent.name, n] = math.nan if loss is None else float(loss)
    return found


@dataclass
class Comparison:
    """Compares the losses with settings to those of the job without, running it by a copy of a trial's runner.

    As far as edits make the settings, the run has these, so that they are tested, too.
    """

    runner: Runner
    why: dict[str, None] = field(default_factory=dict)  # why runs failed
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
            self.runner,
            folder=folder,
            recording=recording,
            keep=kept,
            steps=min(self.runner.steps, MOST),
            seconds=0.0,
            may_be_the_same=True,
            edits=self.runner.copy,
        )
        try:
            done = once(settings, max(until - time.monotonic(), 0.0))
            if isinstance(done, Failed):
                self.why[f"losses were not compared: {done.why}"] = None
                return None
            return losses_of(kept)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def compared(plain: Losses, changed: Losses, other_seed: Losses) -> Verdict:
    """Compare losses without and with a change by those of a run without it and with another seed; "": too few."""
    common = sorted(plain.keys() & changed.keys())
    if len(common) < LEAST:
        return ""
    apart = [changed[key] - plain[key] for key in common]
    if all(plain[key] == changed[key] or (math.isnan(plain[key]) and math.isnan(changed[key])) for key in common):
        return "equal"
    seeds = _size([plain[key] - other_seed[key] for key in common if key in other_seed])
    if seeds > 0:
        return "within" if _size(apart) <= MARGIN * seeds else "differ"
    steps = _size([plain[key] - plain[key[0], key[1] - 1] for key in common if (key[0], key[1] - 1) in plain])
    mean = abs(math.fsum(apart)) / len(apart)
    return "within" if _size(apart) <= steps and mean <= SURE * steps / math.sqrt(len(apart)) else "differ"


def _size(differences: Sequence[float]) -> float:
    """Return the root of the mean square."""
    return math.sqrt(math.fsum(x * x for x in differences) / len(differences)) if differences else 0.0
