"""Maps measures over ranks: reads each rank once, computes every wanted measure of it, drops its tables.

A per-rank measure is a function of one rank's tables to a small frame. An across-ranks measure is a function of those
frames. Only the small frames leave the process that read the rank. Where a measure could not know (NotMeasured) or
failed, that travels in place of its frame.
"""

from dlprof.analysis.engine.needs import (
    Frame,
    Maybe,
    Measure,
    MeasureFailed,
    across_ranks,
    all_needed,
    check_needs,
    maybe,
    needs,
    needs_of,
    per_rank,
    within_rank,
)
from dlprof.analysis.engine.ranks import JOB, RANK, Job, Measured, RankData, RankFacts, by_rank
from dlprof.analysis.engine.run import ALSO, Done, Progress, answers_of, measure, so_far
from dlprof.analysis.engine.store import Store, find, open_store

__all__ = [
    "ALSO",
    "JOB",
    "RANK",
    "Done",
    "Frame",
    "Job",
    "Maybe",
    "Measure",
    "MeasureFailed",
    "Measured",
    "Progress",
    "RankData",
    "RankFacts",
    "Store",
    "across_ranks",
    "all_needed",
    "answers_of",
    "by_rank",
    "check_needs",
    "find",
    "maybe",
    "measure",
    "needs",
    "needs_of",
    "open_store",
    "per_rank",
    "so_far",
    "within_rank",
]
