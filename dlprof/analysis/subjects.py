"""The subjects of the analysis: a folder each, with its measures, rules and panels.

Importing this makes the measures of all subjects known to the engine. A measure that one rule or one panel alone names
may stand in its file instead.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from dlprof.analysis import engine

SUBJECTS = (
    "timeline",
    "step",
    "throughput",
    "input",
    "communication",
    "experts",
    "stragglers",
    "pipeline",
    "compute",
    "precision",
    "memory",
    "host",
    "machine",
    "source",
)

for _subject in SUBJECTS:
    _package = importlib.import_module(f"dlprof.analysis.{_subject}")
    for _module in pkgutil.iter_modules(_package.__path__):
        if not _module.ispkg:
            importlib.import_module(f"{_package.__name__}.{_module.name}")

engine.check_measures()


def every_measure() -> tuple[engine.Measure[Any], ...]:
    """Return all measures of the package, by name, those in the files of rules and panels too."""
    for listed in ("rules", "panels"):  # which import this
        importlib.import_module(f"dlprof.analysis.{listed}")
    return tuple(m for m in engine.known_measures() if m.function.__module__.startswith("dlprof."))


def check(function: Callable[..., Any], given: int = 0) -> None:
    """Raise TypeError where a rule or a panel names an unknown need; `given`: its first parameters that are none."""
    engine.check_needs(function, given=given)
