"""Keeps the script's own files, so that a comparison of two runs can tell whether the program changed too."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from dlprof import redaction
from dlprof.record.calls import own_files, read_source
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

_MOST_FILES = 200
_MOST_BYTES = 8 << 20


class Sources:
    """Writes the log `sources`, of rank 0: of each file its SHA-256, and its text as far as redaction.py keeps it.

    A file is the script's own if it is neither Python's nor an installed package's, and lies below the folder of the
    script or the one that the job was started in.
    """

    name = "sources"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._read: dict[str, bytes | None] = {}
        self._left = _MOST_BYTES
        # A run of a trial is thrown away.
        self._is_wanted = os.environ.get("DLPROF_SOURCES") != "off" and not os.environ.get("DLPROF_TRIAL")
        self._since = time.time()

    def start(self, recorder: Recorder) -> None:
        """Read what is imported by now: the script may be edited while it runs."""
        if self._is_wanted and recorder.rank == 0:
            self._recorder = recorder
            self._look(recorder)

    def step(self, done: Sequence[Step]) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Read what was imported since, and write."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        self._look(recorder)
        files = {
            path.removeprefix(recorder.observed.calls.directory): {
                "sha256": hashlib.sha256(data).hexdigest(),
                "text": redaction.source(data.decode(errors="replace")),
            }
            for path, data in self._read.items()
            if data is not None
        }
        if files:
            recorder.keep("sources", json.dumps({"format": 1, "files": files}))

    def _look(self, recorder: Recorder) -> None:
        is_own, here = own_files(), recorder.observed.calls.directory
        loaded = [_file(module) for module in (sys.modules.get("__main__"), *list(sys.modules.values()))]
        folders = (here, os.path.join(os.path.dirname(os.path.join(here, loaded[0])), ""))  # noqa: PTH118, PTH120
        for name in loaded:
            path = os.path.normpath(os.path.join(here, name))  # noqa: PTH118
            if not name.endswith(".py") or path in self._read or not path.startswith(folders) or not is_own(path):
                continue
            data = read_source(path, self._since) if len(self._read) < _MOST_FILES else None
            self._read[path] = data if len(data or b"") <= self._left else None
            self._left -= len(self._read[path] or b"")


def _file(module: Any) -> str:
    name = getattr(module, "__dict__", {}).get("__file__")  # getattr of a lazy module may import
    return name if isinstance(name, str) else ""
