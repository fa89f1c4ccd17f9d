"""What `dlprof try` found: structs, to and from a run's try.json (format 1). A result holds the same as `tried`.

A ratio is how many times faster the job is with the settings: its mean step without them ÷ with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dlprof.errors import DlprofError

FORMAT = 1
FILE = "try.json"

# gain: faster by more than 2 %. no_gain: not faster by more than 2 %. slower: slower by more than 2 %. unclear: the
# runs do not say. not_counted: it ran, but does not count (`why`). not_tried: it did not run (`why`).
Verdict = Literal["gain", "no_gain", "slower", "unclear", "not_counted", "not_tried"]

# complete: all answers are clear. out_of_time: some are not. interrupted: by a signal. failed: the job itself did not
# run (`why`).
State = Literal["complete", "out_of_time", "interrupted", "failed"]

# step: the mean steady step. loop: all time from the first to the last measured step, spread over the training steps.
# start: from the import of PyTorch to the first batch.
Of = Literal["step", "loop", "start"]


# Student's t for a two-sided 95 % interval, by degrees of freedom from 1 on.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def student(freedom: float) -> float:
    """Return Student's t for a two-sided 95 % interval with so many degrees of freedom, 1 at least."""
    at = int(freedom) - 1
    return _STUDENT[at] if at < len(_STUDENT) else 1.96 + 2.5 / freedom


class Gain(msgspec.Struct, frozen=True):
    """How many times faster: the mean over pairs of runs, and its 95 % interval (None: of a single pair)."""

    ratio: float
    low: float | None = None
    high: float | None = None
    pairs: int = 1


# Before the line of a file, in the name of a setting that an edit of code makes; its value is the name of an idiom.
CODE = "code."


class Attempt(msgspec.Struct, frozen=True):
    """One change that was tried, or several together: settings by their names in --set."""

    settings: Mapping[str, bool | int | float | str]
    verdict: Verdict
    why: str = ""
    findings: tuple[str, ...] = ()  # that name the change; (): none does
    of: Of = "step"  # what `measured` and `predicted` are of
    predicted: float | None = None
    measured: Gain | None = None
    epochs: Gain | None = None  # over whole epochs, with what starts and ends them; None: none was in the runs
    before_ns: float | None = None  # the mean step (or start) without the settings, and with them
    after_ns: float | None = None
    numerics: bool = False  # the job computes other numbers
    edit: str = ""  # the diff that was applied to a copy of the job's files; "": settings alone
    losses: Literal["", "equal", "within", "differ"] = ""  # as without it: the same bits, or as close as equal runs

    @property
    def words(self) -> str:
        """The settings as one text: "loader.num_workers=4, loader.persistent_workers=True"."""
        return ", ".join(
            f"the edit of {name.removeprefix(CODE)} ({value})" if name.startswith(CODE) else f"{name}={value}"
            for name, value in self.settings.items()
        )


class Tried(msgspec.Struct, frozen=True):
    """All that was tried on a run."""

    state: State
    attempts: tuple[Attempt, ...] = ()  # single changes, in the order in which they were tried
    combinations: tuple[Attempt, ...] = ()  # each against the best before it
    best: Attempt | None = None  # against the job as it was recorded; None: nothing was faster
    why: str = ""
    runs: int = 0
    steps: int = 0  # steady steps of each run
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    diff: str = ""  # the edit that makes `best` permanent, as a unified diff; "": not known
    no_effect: tuple[str, ...] = ()  # settings whose edit was tried, and did not make them

    @property
    def unclear(self) -> tuple[Attempt, ...]:
        """The changes that may still be a gain."""
        return tuple(a for a in self.attempts if a.verdict == "unclear")


def to_json(tried: Tried) -> dict[str, Any]:
    """Return the layout of try.json."""
    data: dict[str, Any] = msgspec.to_builtins(tried)
    return {"format": FORMAT, **data}


def from_json(data: Any) -> Tried:
    """Return what the plain data of try.json say; raise DlprofError where they are invalid, or of a newer format."""
    if not isinstance(data, Mapping):
        raise DlprofError(f"{FILE} holds no object")
    if data.get("format") != FORMAT:
        raise DlprofError(f"{FILE} has format {data.get('format')!r}; this dlprof reads format {FORMAT}: upgrade it")
    try:
        return msgspec.convert(data, Tried)
    except msgspec.ValidationError as e:
        raise DlprofError(f"{FILE} is not what `dlprof try` writes: {e}") from None
