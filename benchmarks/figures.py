"""Whether a change of the code changes a figure: diagnoses runs, and compares with what was said of them before.

    python -m benchmarks.figures ../shared/traces/* reports/*/*/result.json --save before.json
    python -m benchmarks.figures ../shared/traces/* reports/*/*/result.json --against before.json

A path is a run, a folder of traces, or a result.json, of which all figures are taken as they stand. `--words` compares
sentences as well.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.errors import DlprofError
from dlprof.read.run import open_run
from dlprof.result.stored import from_json, to_json

TOLERANCE = 1e-9

# By what an entry of a list is known; others by their place in it.
_NAMES = (("id",), ("rank", "category"), ("rank", "culprit", "category"), ("kind", "name"), ("section", "name"))
# What is no figure of the run.
_NOT_COMPARED = ("format", "dlprof", "manual", "path")
_WORDS = (
    "title",
    "summary",
    "verdict",
    "sure",
    "why",
    "note",
    "advice",
    "changes",
    "warnings",
    "evidence",
    "panels",
    "facts",
)

Flat = dict[str, float | str | None]


def figures(data: Any, words: bool) -> Flat:
    """Return every figure of a result's plain data by its place: outcomes.input_wait.saving_ns."""
    return dict(_flat(data, "", words))


def _flat(value: Any, place: str, words: bool) -> Iterator[tuple[str, float | str | None]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in _NOT_COMPARED and (words or key not in _WORDS):
                yield from _flat(inner, f"{place}.{key}" if place else key, words)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            name = str(number)
            if isinstance(inner, dict):
                keys = next((k for k in reversed(_NAMES) if all(x in inner for x in k)), ())
                name = ":".join(str(inner[key]) for key in keys) or name
            yield from _flat(inner, f"{place}.{name}", words)
    else:
        yield place, value


def taken(words: bool, path: Path) -> tuple[str, Flat]:
    """Return a path and its figures; what cannot be read has one, the error."""
    try:
        if path.name == "result.json":
            data = to_json(from_json(json.loads(path.read_bytes())))
        else:
            data = to_json(diagnose(open_run(path), RULES, jobs=1))
    except DlprofError as e:
        return str(path), {"error": str(e)}
    return str(path), figures(json.loads(json.dumps(data)), words)


def differing(before: Flat, now: Flat) -> list[str]:
    """Name the figures that differ by more than rounding, or that only one side has."""
    found = []
    for name in dict.fromkeys((*before, *now)):
        a, b = before.get(name), now.get(name)
        numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
        if a != b and not (numbers and math.isclose(float(a or 0), float(b or 0), rel_tol=TOLERANCE, abs_tol=1e-6)):
            found.append(f"{name}: {a!r} → {b!r}")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Save the figures of some paths, or compare them; return 1 where one differs."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    options.add_argument("paths", nargs="+", type=Path)
    options.add_argument("--save", type=Path)
    options.add_argument("--against", type=Path)
    options.add_argument("--words", action="store_true")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--shown", type=int, default=8, help="differences of each path that are printed")
    args = options.parse_args(words)
    with ProcessPoolExecutor(args.jobs) as pool:
        now = dict(pool.map(partial(taken, args.words), args.paths))
    if args.save:
        args.save.write_text(json.dumps(now, indent=0))
    if not args.against:
        return 0
    before = json.loads(args.against.read_bytes())
    bad = 0
    for path, of in now.items():
        if path not in before:
            print(f"{path}: not in {args.against}")
            continue
        found = differing(before[path], of)
        bad += bool(found)
        for text in found[: args.shown]:
            print(f"{path}: {text}")
        if len(found) > args.shown:
            print(f"{path}: {len(found) - args.shown} more")
    print(f"{len(now)} paths, {sum(map(len, now.values())):,} figures, {bad} paths differ")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
