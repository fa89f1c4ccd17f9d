"""How long the phases of a report take, as JSON: `python -m benchmarks.phases TRACES OUT`.

Start: from the start of the process to the command, and all imports. Measure: reading, in all processes, and measuring
each rank. Rules: what they say. Page: the result and the page as text. End: writing them, and the rest. It is slower
than `dlprof report`, which reads while it imports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = ("start", "measure", "rules", "page", "end")


def main() -> None:
    """Write the report, and print the seconds of each phase."""
    began = time.time() - _age_s()
    traces, out = map(Path, sys.argv[1:3])
    took = dict.fromkeys(PHASES, 0.0)
    from dlprof.analysis import diagnosis, engine
    from dlprof.commands import report

    def timed(owner: Any, name: str, phase: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            since = time.time()
            if phase == "measure":
                took["start"] = since - began
            try:
                return original(*args, **kwargs)
            finally:
                took[phase] += time.time() - since

        setattr(owner, name, call)

    timed(engine, "measure", "measure")
    timed(diagnosis, "diagnosed", "rules")
    from dlprof.report import html

    timed(html, "render", "page")
    result = report.analyse(traces, page=True)
    report.write_files(result, traces, out)
    took["end"] = time.time() - began - sum(took.values())
    print(json.dumps(took))


def _age_s() -> float:
    """Return for how long this process has run."""
    since = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - since


if __name__ == "__main__":
    main()
