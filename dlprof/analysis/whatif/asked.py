"""A user's what-if request: changes of a run, alone and combined."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from dlprof.errors import DlprofError

PERFECT = math.inf

_FACTOR = re.compile(r"[x×]?\s*(\d+(?:\.\d+)?)\s*[x×]?")


@dataclass(frozen=True)
class Asked:
    """Changes of a run. Factors say how many times as fast something is; None: as it is."""

    input: float | None = None  # making batches; PERFECT: each is ready when it is requested
    workers: int | None = None
    network: float | None = None  # moving bytes between ranks; PERFECT: in no time
    device: float | None = None  # computing: kernels, or on a CPU all operators
    host: float | None = None  # Python, operators and launches on a GPU's host
    copies: float | None = None  # between host and device
    stages: bool = False  # of a pipeline, all alike
    microbatches: int | None = None
    schedule: str | None = None  # of a pipeline

    @property
    def named(self) -> tuple[str, ...]:
        """The changes in words, as in the request."""
        return tuple(_written(f.name, getattr(self, f.name)) for f in fields(self) if self._sets(f.name))

    @property
    def singles(self) -> Iterator[Asked]:
        """Each change alone."""
        for f in fields(self):
            if self._sets(f.name):
                yield replace(Asked(), **{f.name: getattr(self, f.name)})

    def without(self, others: Iterable[Asked]) -> Asked:
        """Return the changes that none of the others makes."""
        none = Asked()
        names = {f.name for one in others for f in fields(one) if one._sets(f.name)}
        return replace(self, **{name: getattr(none, name) for name in names})

    @property
    def of_pipeline(self) -> bool:
        """Whether it changes a pipeline."""
        return self.stages or self.microbatches is not None or self.schedule is not None

    @property
    def of_input(self) -> bool:
        """Whether it changes how batches are made."""
        return self.input is not None or self.workers is not None

    def _sets(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False  # 0 workers are a request


def _written(name: str, value: float | int | str | bool) -> str:
    if name == "stages":
        return "even stages"
    if name in ("workers", "microbatches", "schedule"):
        return f"{name} {value}"
    if value == PERFECT:
        return f"perfect {name}"
    return f"{name} {value:g} × as fast"


def factor(text: str) -> float:
    """Return the factor that "x2", "2x", "1.5" or "perfect" stands for; raise DlprofError for any other text."""
    if text.strip().lower() == "perfect":
        return PERFECT
    m = _FACTOR.fullmatch(text.strip().lower())
    value = float(m[1]) if m else 0.0
    if not 0 < value < 1e6:
        raise DlprofError(f"{text!r} is no speed; write 2x, 1.5x or perfect")
    return value
