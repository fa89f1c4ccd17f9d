"""Says of a job that has ended what its overrides (`--set`) did, and which never took effect in any rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dlprof import overrides, run_folder
from dlprof.overrides import Outcome


def outcomes(folder: Path, asked: Iterable[str]) -> dict[str, Outcome]:
    """Return what each override did in the ranks of a run folder, by name; a rank that left no file did nothing."""
    reports = []
    for path in run_folder.of_ranks(run_folder.in_ranks(folder), "overrides.json"):
        try:
            reports.append(json.loads(path.read_text()))
        except (OSError, ValueError, RecursionError):  # noqa: PERF203 - of a rank that was killed, or a disk that is full
            continue
    found = overrides.outcomes(asked, reports)
    return {name: found[name] for name in asked}


def applied(folder: Path, asked: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the overrides, by name and value, that applied everywhere: what it changed, where."""
    found = outcomes(folder, asked).items() if asked else ()
    return [f"{name} {overrides.described(asked[name], one)}" for name, one in found if one.applied and not one.error]


def unapplied(folder: Path, asked: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the overrides, by name and value, that did not apply, with the reason where known."""
    lines = []
    for name, outcome in outcomes(folder, asked).items():
        said = f"--set {name}={asked[name]}"
        why = f": {outcome.error}" if outcome.error else ""
        if not outcome.applied:
            lines.append(f"{said} never applied{why}")
        elif outcome.error:
            lines.append(f"{said} did not apply everywhere{why}")
    return lines
