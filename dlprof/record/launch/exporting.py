"""Starts the process that hands out the figures of a job while it runs (dlprof.live.metrics), if one is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from dlprof.plain import tell
from dlprof.record.launch.process import wait_or_kill
from dlprof.record.ranks import local_rank

_END_S = 2.0  # the longest wait for it after the job: it pushes the last figures


class Metrics:
    """That process: it says itself what goes wrong, and nothing of it reaches the job."""

    def __init__(self, run: Path, env: Mapping[str, str]) -> None:
        self._run, self._address = run, env.get("DLPROF_METRICS", "")
        self._env = {name: value for name, value in env.items() if not name.startswith("DLPROF_")}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; of several tasks of a job on a host, in the first alone: it serves all ranks of the host."""
        if not self._address or local_rank() not in (None, 0):
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dlprof.live.metrics", self._run, self._address, str(os.getpid())],
                # In no folder of the user's, whose modules may have the names of others.
                env=self._env | {"PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for the job
            )
        except (OSError, subprocess.SubprocessError) as e:
            tell(f"--metrics is off: {e}")

    def end(self) -> None:
        """Tell it that the job is over, and wait for its last figures."""
        if self._process is not None:
            self._process.terminate()
            wait_or_kill(self._process, _END_S)
