"""What a batch takes each loader worker."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.loader import worker_means
from dlprof.overview import Picture
from dlprof.result import Panel
from dlprof.units import UNKNOWN, duration, size

# Loader workers that are shown, of all ranks.
MOST_WORKERS = 64


def draw(run: Measured) -> list[Panel]:
    """Tell of each loader worker what its mean batch takes."""
    frame = run.frame(worker_means)
    if not (frame["worker"] >= 0).any():
        raise NotMeasured("no loader has workers")

    def cell(value: float, write: Callable[[float], str]) -> str:
        return UNKNOWN if pd.isna(value) else write(value)

    times = ("dur_ns", "collate_ns", "cpu_ns", "delay_ns")
    rows = tuple(
        (
            int(row["rank"]),
            int(row["worker"]),
            int(row["batches"]),
            *(cell(row[c], duration) for c in times),
            *(cell(row[c], size) for c in ("stored_bytes", "read_bytes")),
        )
        for row in frame.head(MOST_WORKERS).to_dict("records")
    )
    more = len(frame) - len(rows)
    return [
        Panel(
            "table",
            "Loader workers: what a batch takes each",
            rows,
            (
                "rank",
                "worker",
                "batches",
                "fetch",
                "of it collating",
                "CPU time",
                "waiting for a core",
                "read from storage",
                "read in all",
            ),
            note="Means a batch in the steady steps; CPU time is the worker's whole process's."
            + (f" The first {len(rows)} of {len(frame)} workers." if more > 0 else ""),
        )
    ]


PICTURE = Picture((worker_means,), draw)
