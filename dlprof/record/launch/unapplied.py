"""Says of a job that has ended which of its overrides (`--set`) never took effect in any rank, or failed in one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlprof import overrides


def unapplied(folder: Path, asked: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the overrides, by name and value, that did not apply, with the reason where known."""
    reports = []
    for path in sorted(folder.glob("ranks/*/overrides.json")):
        try:
            reports.append(json.loads(path.read_text()))
        except (OSError, ValueError):  # noqa: PERF203 - of a rank that was killed, or a disk that is full
            continue
    lines = []
    for name, outcome in overrides.outcomes(asked, reports).items():
        said = f"--set {name}={asked[name]}"
        why = f": {outcome.error}" if outcome.error else ""
        if not outcome.applied:
            lines.append(f"{said} never applied{why}")
        elif outcome.error:
            lines.append(f"{said} did not apply everywhere{why}")
    return lines
