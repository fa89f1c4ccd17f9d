"""try.json of a run folder: written, and added to the result of that run."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import replace

from dlprof.errors import DlprofError
from dlprof.files import compact, write, writing
from dlprof.read.opening import Inside, read_file
from dlprof.result import Result
from dlprof.result.tried import FILE, Tried, from_json, to_json


def keep(folder: Path, tried: Tried) -> None:
    """Write what was tried into a run folder; raise DlprofError where it takes no file."""
    with writing(str(folder / FILE)):
        write(folder / FILE, compact(to_json(tried)))


def kept(path: Path) -> Tried | None:
    """Return what was tried on a run; None where nothing was. Raises DlprofError where the file says nothing."""
    if not path.is_dir() or not Inside(path).holds(path / FILE):
        return None
    try:
        return from_json(json.loads(read_file(path / FILE)))
    except (ValueError, RecursionError) as e:
        raise DlprofError(f"{path / FILE} is broken ({str(e)[:120]})") from None


def with_tried(result: Result, path: Path) -> Result:
    """Return a run's result with what was tried on it; where try.json says nothing, with a warning."""
    try:
        tried = kept(path)
    except DlprofError as e:
        return replace(result, run=replace(result.run, warnings=(*result.run.warnings, str(e))))
    return result if tried is None else replace(result, tried=tried)
