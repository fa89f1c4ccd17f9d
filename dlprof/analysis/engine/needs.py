"""Measures: functions whose parameters name what they are made from, and their registry."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

import pandas as pd

from dlprof import schema
from dlprof.errors import NotMeasured

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Frame: TypeAlias = pd.DataFrame  # what most measures are

# The parameters that are facts and no measures.
RANK = "rank"
JOB = "job"


class Maybe(Generic[T_co]):
    """A need that may be lacking, computed on first use: the annotation of a parameter that is not required."""

    def __init__(self, ask: Callable[[], T_co], lacking: Mapping[int, str] | None = None) -> None:
        self._ask = ask
        self.lacking = lacking or {}  # of a per-rank measure named across ranks: the ranks without it, and why

    def get(self) -> T_co:
        """Return the value; raise NotMeasured where it is not known, MeasureFailed where its measure broke."""
        return self._ask()

    def or_none(self) -> T_co | None:
        """Return the value; None where it is not known."""
        try:
            return self._ask()
        except (NotMeasured, MeasureFailed):
            return None

    def why(self) -> str:
        """Return why the value is not known; "" where it is."""
        try:
            self._ask()
        except (NotMeasured, MeasureFailed) as e:
            return str(e)
        return ""

    @property
    def broke(self) -> bool:
        """Whether its measure failed; the report's warnings say so."""
        try:
            self._ask()
        except MeasureFailed:
            return True
        except NotMeasured:
            pass
        return False

    def __bool__(self) -> bool:
        """Return whether there is a value, and where that has a length, anything in it."""
        value = self.or_none()
        return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


@dataclass(frozen=True)
class Need:
    """What a parameter needs: the name of a measure, a table or facts, and whether it may be lacking."""

    name: str
    optional: bool


def needs_of(function: Callable[..., Any], given: int = 0) -> tuple[Need, ...]:
    """Return what the parameters of a function need, but for the first `given`, which its caller passes."""
    if inspect.isfunction(function) and not hasattr(function, "__wrapped__"):
        # What inspect.signature takes a tenth of the imports of all measures for.
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        annotations = [(name, function.__annotations__.get(name, "")) for name in names]
    else:
        annotations = [(p.name, p.annotation) for p in inspect.signature(function).parameters.values()]
    # With postponed evaluation an annotation is a text.
    return tuple(Need(name, "Maybe[" in str(annotation)) for name, annotation in annotations[given:])


class Scope(Enum):
    """Where a measure is computed."""

    WITHIN_RANK = "within a rank"  # from one rank's tables; never leaves the process that read them
    PER_RANK = "per rank"  # the same, but a small frame, which travels to the main process
    ACROSS_RANKS = "across ranks"  # in the main process, from what travelled


@dataclass(frozen=True, eq=False)
class Measure(Generic[T_co]):
    """A function that the engine calls: its parameters name what it is made from.

    For one rank these are tables (`schema.TABLES`), other measures of a rank, and `rank`, its facts. Across ranks they
    are per-rank measures, each as the frames of all ranks with a column `rank`; measures across ranks; and `job`, the
    facts of all ranks.
    """

    name: str
    function: Callable[..., T_co] = field(repr=False)
    scope: Scope
    needs: tuple[Need, ...]

    @property
    def across(self) -> bool:
        """Whether it is computed in the main process."""
        return self.scope is Scope.ACROSS_RANKS

    @property
    def travels(self) -> bool:
        """Whether it is known once a run was measured."""
        return self.scope is not Scope.WITHIN_RANK

    @property
    def is_frame(self) -> bool:
        """Whether it returns a frame, by its annotation."""
        return self.function.__annotations__.get("return") in ("pd.DataFrame", pd.DataFrame)

    def __reduce__(self) -> tuple[Any, ...]:
        return _measure_of, (self.function.__module__, self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> T_co:
        """Call the function with what its parameters name."""
        return self.function(*args, **kwargs)


_MEASURES: dict[str, Measure[Any]] = {}
_checked: set[str] = set()  # measures with all that they need: a graph of a hundred has millions of paths
_complete: list[bool] = []  # filled once all measures of the subjects are known


def _measure_of(module: str, name: str) -> Measure[Any]:
    # A fresh process knows no measures yet; the first import registers those of all subjects.
    importlib.import_module("dlprof.analysis.subjects")
    importlib.import_module(module)
    return _MEASURES[name]


def _register(function: Callable[..., T], scope: Scope) -> Measure[T]:
    name = function.__name__
    if name in _MEASURES or name in schema.TABLES or name in (RANK, JOB):
        raise TypeError(f"{function.__module__}: there already is a measure or a table {name!r}")
    measure = Measure(name, function, scope, needs_of(function))
    if _complete:
        _check_measure(measure)
    _MEASURES[name] = measure
    return measure


def within_rank(function: Callable[..., T]) -> Measure[T]:
    """Register a measure of one rank's tables that only other measures of a rank use."""
    return _register(function, Scope.WITHIN_RANK)


def per_rank(function: Callable[..., pd.DataFrame]) -> Measure[pd.DataFrame]:
    """Register a measure of one rank's tables: a small frame that rules, panels and measures across ranks may name."""
    return _register(function, Scope.PER_RANK)


def across_ranks(function: Callable[..., T]) -> Measure[T]:
    """Register a measure of the per-rank measures of all ranks."""
    return _register(function, Scope.ACROSS_RANKS)


def check_needs(function: Callable[..., Any], scope: Scope = Scope.ACROSS_RANKS, given: int = 0) -> None:
    """Raise TypeError where a parameter names an unknown or forbidden need, or where needs form a cycle."""
    _check(f"{function.__module__}.{function.__qualname__}", needs_of(function, given), scope, ())


def _check(who: str, needs: Sequence[Need], scope: Scope, path: tuple[str, ...]) -> None:
    across = scope is Scope.ACROSS_RANKS
    for need in needs:
        known = _MEASURES.get(need.name)
        if need.name in path:
            raise TypeError(f"{who}: {' needs '.join((*path, need.name))}")
        if known is not None and (known.scope is not Scope.WITHIN_RANK if across else not known.across):
            _check_measure(known, path)
        elif need.name not in ((JOB,) if across else (RANK, *schema.TABLES)):
            raise TypeError(f"{who}: nothing {scope.value} is {need.name!r}")


def _check_measure(measure: Measure[Any], path: tuple[str, ...] = ()) -> None:
    if measure.name not in _checked:
        _check(f"{measure.function.__module__}.{measure.name}", measure.needs, measure.scope, (*path, measure.name))
        _checked.add(measure.name)


def check_measures() -> None:
    """Raise TypeError where the needs of a measure are wrong; from now on each is checked where it is registered."""
    for measure in _MEASURES.values():
        _check_measure(measure)
    _complete.append(True)


def known_measures() -> tuple[Measure[Any], ...]:
    """Return the measures that were imported so far, by name."""
    return tuple(_MEASURES[name] for name in sorted(_MEASURES))


class MeasureFailed(Exception):  # noqa: N818 - what became of a measure, as NotMeasured is
    """A measure failed, which is a bug of dlprof; with its message."""


def named(name: str) -> Measure[Any]:
    """Return the measure of a name."""
    return _MEASURES[name]


def measures_among(needs: Sequence[Need]) -> list[Measure[Any]]:
    """Return the measures among these needs; the others are tables and facts."""
    return [_MEASURES[need.name] for need in needs if need.name in _MEASURES]


def call_with(function: Callable[..., T], needs: Sequence[Need], value: Callable[[Need], Any], *given: Any) -> T:
    """Call a function with `given` and its needs; `value` returns the value of each."""
    return function(*given, **{need.name: value(need) for need in needs})
