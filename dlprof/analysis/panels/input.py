"""What a batch takes each loader worker."""

from __future__ import annotations

from dlprof.analysis.engine import Frame, needs
from dlprof.analysis.input.loader import worker_means
from dlprof.analysis.panel import Picture, table
from dlprof.errors import DoesNotApply
from dlprof.result import Panel

_COLUMNS = {
    "rank": "rank",
    "worker": "worker",
    "batches": "batches",
    "dur_ns": "fetch_ns",
    "collate_ns": "of it collating_ns",
    "cpu_ns": "CPU time_ns",
    "delay_ns": "waiting for a core_ns",
    "stored_bytes": "read from storage_bytes",
    "read_bytes": "read in all_bytes",
}


# Loader workers that are shown, of all ranks.
MOST_WORKERS = 64


def draw(worker_means: Frame = needs(worker_means)) -> list[Panel]:
    """List what a mean batch takes each loader worker."""
    if not (worker_means["worker"] >= 0).any():
        raise DoesNotApply("no loader has workers")
    note = "Means a batch in the steady steps; CPU time is the worker's whole process's."
    if len(worker_means) > MOST_WORKERS:
        note += f" The first {MOST_WORKERS} of {len(worker_means)} workers."
    return [table("Loader workers: what a batch takes each", worker_means, _COLUMNS, MOST_WORKERS, note)]


PICTURE = Picture(draw)
