"""Measures: functions with parameter defaults that name their inputs.

    @across_ranks
    def own_time(means: Frame = needs(step_means), waits: Maybe[Frame] = maybe(input_waits), job: Job = needs(JOB)): ...

What is named is imported, so that an editor leads from a measure to what it stands on and back, mypy checks its type,
and a cycle of needs cannot be written.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar, cast, overload

import pandas as pd
from msgspec import StructMeta

from dlprof.errors import NotMeasured
from dlprof.schema import Table

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Frame: TypeAlias = pd.DataFrame  # what most measures are


class Maybe(Generic[T_co]):
    """A need that may be lacking, computed on first use."""

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


class Scope(Enum):
    """Where a measure is computed."""

    WITHIN_RANK = "within a rank"  # from one rank's tables; never leaves the process that read them
    PER_RANK = "per rank"  # the same, but a small frame, which travels to the main process
    ACROSS_RANKS = "across ranks"  # in the main process, from what travelled


@dataclass(frozen=True, eq=False)
class Fact(Generic[T_co]):
    """What is known apart from tables and measures: of one rank, or of the job."""

    name: str
    across: bool


@dataclass(frozen=True, eq=False)
class Need:
    """What a parameter needs, and whether it may be lacking: the parameter's default."""

    of: Measure[Any] | Table | Fact[Any]
    optional: bool


@overload
def needs(of: Measure[T]) -> T: ...
@overload
def needs(of: Fact[T]) -> T: ...
@overload
def needs(of: Table) -> pd.DataFrame: ...
def needs(of: Measure[Any] | Table | Fact[Any]) -> Any:
    """Return the default of a parameter that needs a measure, a table of `schema`, RANK or JOB."""
    return cast("Any", Need(of, optional=False))


@overload
def maybe(of: Measure[T]) -> Maybe[T]: ...
@overload
def maybe(of: Table) -> Maybe[pd.DataFrame]: ...
def maybe(of: Measure[Any] | Table) -> Any:
    """Return the same where it may be lacking; the function gets a Maybe."""
    return cast("Any", Need(of, optional=True))


def _defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    # inspect.signature would take a tenth of the time of importing all measures, and evaluates a Struct's annotations.
    if isinstance(function, StructMeta):
        names, defaults = function.__struct_fields__, function.__struct_defaults__
        return dict.fromkeys(names) | dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return {p.name: p.default for p in inspect.signature(function).parameters.values()}
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    by_place = zip(names[code.co_argcount - len(defaults) :], defaults, strict=False)
    return dict.fromkeys(names) | dict(by_place) | (function.__kwdefaults__ or {})


def needs_of(function: Callable[..., Any]) -> dict[str, Need]:
    """Return what the parameters of a function, or the fields of a Struct, need, by name."""
    return {name: default for name, default in _defaults_of(function).items() if isinstance(default, Need)}


@dataclass(frozen=True, eq=False)
class Measure(Generic[T_co]):
    """A function that the engine calls with what its parameters need.

    For one rank these are tables, other measures of a rank, and RANK. Across ranks they are per-rank measures, each as
    the frames of all ranks with a column `rank`; measures across ranks; and JOB.
    """

    name: str
    function: Callable[..., T_co] = field(repr=False)
    scope: Scope
    needs: Mapping[str, Need] = field(repr=False)

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
        """Call the function."""
        return self.function(*args, **kwargs)


_measures: dict[str, Measure[Any]] = {}  # answers are kept by name: each must be one measure's


def _measure_of(module: str, name: str) -> Measure[Any]:
    importlib.import_module(module)
    return _measures[name]


def _register(function: Callable[..., T], scope: Scope) -> Measure[T]:
    name = function.__name__
    if name in _measures:
        raise TypeError(f"{function.__module__}: there already is a measure {name!r}")
    check_needs(function, scope)
    _measures[name] = measure = Measure(name, function, scope, needs_of(function))
    return measure


def within_rank(function: Callable[..., T]) -> Measure[T]:
    """Make a measure of one rank's tables that only other measures of a rank use."""
    return _register(function, Scope.WITHIN_RANK)


def per_rank(function: Callable[..., pd.DataFrame]) -> Measure[pd.DataFrame]:
    """Make a measure of one rank's tables: a small frame that rules, panels and measures across ranks may need."""
    return _register(function, Scope.PER_RANK)


def across_ranks(function: Callable[..., T]) -> Measure[T]:
    """Make a measure of the per-rank measures of all ranks."""
    return _register(function, Scope.ACROSS_RANKS)


def check_needs(function: Callable[..., Any], scope: Scope = Scope.ACROSS_RANKS, given: int = 0) -> None:
    """Raise TypeError where a parameter after the first `given` needs nothing, or something not known there."""
    who = f"{function.__module__}.{function.__qualname__}"
    for name, need in [*_defaults_of(function).items()][given:]:
        if not isinstance(need, Need):
            raise TypeError(f"{who}: the parameter {name!r} needs no measure, table or fact")
        of = need.of
        if scope is Scope.ACROSS_RANKS:
            known = of.travels if isinstance(of, Measure) else isinstance(of, Fact) and of.across
        else:
            known = isinstance(of, Table) or not of.across
        if not known:
            raise TypeError(f"{who}: {of.name!r} is not known {scope.value}")


class MeasureFailed(Exception):  # noqa: N818 - what became of a measure, as NotMeasured is
    """A measure failed, which is a bug of dlprof; with its message."""


def all_needed(
    wanted: Iterable[Measure[Any] | Callable[..., Any]], *, into_ranks: bool = True
) -> tuple[Measure[Any], ...]:
    """Return the measures among these and all that they need, by name; of per-rank ones only `into_ranks`."""
    found: dict[str, Measure[Any]] = {}
    todo, seen = list(wanted), set()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if isinstance(one, Measure):
            found[one.name] = one
        if into_ranks or not isinstance(one, Measure) or one.across:
            needed = one.needs if isinstance(one, Measure) else needs_of(one)
            todo += [need.of for need in needed.values() if isinstance(need.of, Measure)]
    return tuple(found[name] for name in sorted(found))


def call_with(function: Callable[..., T], found: Mapping[str, Need], value: Callable[[Need], Any], *given: Any) -> T:
    """Call a function with `given` and its needs; `value` returns the value of each."""
    return function(*given, **{name: value(need) for name, need in found.items()})
