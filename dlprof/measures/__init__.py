"""Small frames derived from the tables of one rank, or from such frames of all ranks; each computed once a run."""

from __future__ import annotations

import importlib
import pkgutil

from dlprof import engine, timeline

for _package in (timeline.__name__, __name__):
    for _module in pkgutil.iter_modules(importlib.import_module(_package).__path__):
        importlib.import_module(f"{_package}.{_module.name}")

engine.check_measures()
