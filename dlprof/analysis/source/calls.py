"""The calls of the user's that ranks recorded."""

from __future__ import annotations

from dlprof.analysis.engine import Job, across_ranks
from dlprof.analysis.source.patches import Call, calls_of


@across_ranks
def call_sites(job: Job) -> list[Call]:
    """Return the calls of the script that were recorded, each once over all ranks; none of foreign traces."""
    return calls_of(job.facts[rank] for rank in job.ranks)
