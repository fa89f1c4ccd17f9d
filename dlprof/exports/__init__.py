"""A run in the formats of other tools: one file a format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from dlprof.files import whole, writing


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Return path to write to, so that no partial file is seen or left behind; raise DlprofError if that fails.

    What is no ordinary file (a pipe, /dev/stdout) is written to itself: a renamed file would take its place.
    """
    itself = path.exists() and not path.is_file()
    with writing(str(path)), nullcontext(path) if itself else whole(path) as part:
        yield part
