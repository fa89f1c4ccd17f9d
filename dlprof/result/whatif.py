"""What a run's step would be with something changed: structs that `dlprof whatif` prints."""

from __future__ import annotations

import msgspec

from dlprof.result.throughput import Throughput


class Answer(msgspec.Struct, frozen=True):
    """What becomes of the mean steady step with some changes, ns; None: not known, and `why`. `unknown`: its limits."""

    changes: tuple[str, ...]
    step_ns: float | None
    why: str = ""
    unknown: tuple[str, ...] = ()


class Answers(msgspec.Struct, frozen=True):
    """The run as it is, each change alone, and, of several, all of them together."""

    step_ns: float
    alone: tuple[Answer, ...]
    together: Answer | None
    throughput: Throughput | None
