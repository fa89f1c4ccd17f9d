"""The chunks that a rank of a pipeline computes, recorded or read off its trace: their time, and its mean call."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, RankFacts, per_rank, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steady import standard_error
from dlprof.errors import DoesNotApply, NotMeasured

# The action of the row of one schedule.step(); all other rows are its chunks.
SCHEDULE = "schedule"

# What stages hand over by; a kernel of NCCL's may be a send, a receive or both.
SENDS = ("send", "recv", "send_recv")

NO_PIPELINE = "no pipeline: no step of one was recorded, and no trace shows anything sent from rank to rank"

_STEPS, _MOST_ROWS = 40, 4_000  # that travel of a rank's chunks at most, spread over the run


@within_rank
def sends_to_ranks(spans: pd.DataFrame) -> bool:
    """Return whether the trace holds sends and receives, without which there is no pipeline."""
    return bool(host.is_one_of(spans["collective"], *SENDS).any())


@within_rank
def pipeline_facts(
    chunks: Maybe[pd.DataFrame],
    traced_facts: Maybe[Mapping[str, Any]],
    sends_to_ranks: Maybe[bool],
    rank: RankFacts,
) -> Mapping[str, Any]:
    """Return the pipeline's schedule, microbatches and ranks, and the rank's stages. Raises NotMeasured with why.

    Raises DoesNotApply where nothing looks like a pipeline.
    """
    if not rank.facts:
        return traced_facts.get()
    if not rank.facts.get("pipeline"):
        if sends_to_ranks.or_none():
            raise NotMeasured("the ranks send to each other, but in no schedule of torch.distributed.pipelining")
        raise DoesNotApply(NO_PIPELINE)
    if not len(chunks.get()):
        raise NotMeasured("no step of the pipeline's schedule was recorded: record more steps")
    return dict(rank.facts["pipeline"])


@within_rank
def all_chunks(chunks: Maybe[pd.DataFrame], traced_chunks: Maybe[pd.DataFrame], rank: RankFacts) -> pd.DataFrame:
    """Return the chunks of all steps; `call` counts the calls of schedule.step() within a step."""
    if not chunks and not rank.facts:
        return traced_chunks.get().assign(call=0)
    frame = chunks.get()
    # Within each step: a host may begin the next step's call while its device still runs this one's chunks.
    calls = (frame["action"] == SCHEDULE).astype("int64").groupby(frame["step"].to_numpy()).cumsum()
    return frame.assign(call=(calls - 1).clip(lower=0))


@within_rank
def steady_chunks(
    all_chunks: pd.DataFrame, chunks: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame]
) -> pd.DataFrame:
    """Return the chunks of the steady steps, or of all traced ones where the trace is all there is."""
    if not chunks:
        return all_chunks
    return all_chunks[all_chunks["step"].isin(light_steps.get().query("steady")["step"])]


@within_rank
def has_pipeline(all_chunks: Maybe[pd.DataFrame]) -> bool:
    """Return whether the rank's chunks are known."""
    return bool(all_chunks)


@within_rank
def outside_chunks(all_chunks: pd.DataFrame) -> iv.Intervals:
    """Return the time inside a schedule.step() and outside its chunks, of the calls whose chunks are known."""
    detailed = all_chunks["step"].isin(all_chunks.loc[all_chunks["action"] != SCHEDULE, "step"])
    return iv.subtract(host.cover(_calls(all_chunks[detailed])), inside_chunks(all_chunks))


@within_rank
def outside_chunks_ns(
    chunks: Maybe[pd.DataFrame], steady_chunks: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame]
) -> float:
    """Return ns of the mean steady step that schedule.step() spends outside its chunks; 0: no chunks were recorded."""
    if not chunks:
        return 0.0
    calls = _calls(steady_chunks.get())
    return float((calls["dur_ns"] - calls["busy_ns"]).clip(lower=0).sum()) / max(light_steps.get()["steady"].sum(), 1)


@per_rank
def pipeline(pipeline_facts: Mapping[str, Any], steady_chunks: pd.DataFrame) -> pd.DataFrame:
    """Return one row of the steady calls of schedule.step(): which schedule, and the mean call in ns.

    Columns: schedule, microbatches, stages and ranks (as text, ", " between), size (how many ranks), first_stage (this
    rank holds it), chunks (stages a rank), calls_a_step (of training), dur_ns, busy_ns (inside chunks), noise_ns
    (standard error of the rest).
    """
    calls = _calls(steady_chunks)
    if not len(calls):
        raise NotMeasured("no steady step ran the pipeline")
    row = {
        "schedule": str(pipeline_facts["schedule"]),
        "microbatches": int(pipeline_facts["microbatches"]),
        "stages": ", ".join(map(str, pipeline_facts["stages"])),
        "ranks": ", ".join(map(str, pipeline_facts["ranks"])),
        "size": len(pipeline_facts["ranks"]),
        "first_stage": 0 in pipeline_facts["stages"],
        "chunks": len(pipeline_facts["stages"]),
        "calls_a_step": len(calls) / calls["step"].nunique(),
        "dur_ns": float(calls["dur_ns"].mean()),
        "busy_ns": float(calls["busy_ns"].mean()),
        "noise_ns": standard_error((calls["dur_ns"] - calls["busy_ns"]).to_numpy(dtype=float)),
    }
    return pd.DataFrame([row])


@per_rank
def pipeline_chunks(steady_chunks: pd.DataFrame) -> pd.DataFrame:
    """Return the chunks of some steady steps, one by one, and the row of the call that they belong to.

    Columns: step, call, stage, microbatch, action, start_ns, dur_ns. Ranks choose the same steps, as far as they have
    them: those whose numbers a power of two divides.
    """
    detailed = np.unique(steady_chunks.loc[steady_chunks["action"] != SCHEDULE, "step"])
    if not len(detailed):
        raise NotMeasured("no chunk of a steady step was recorded")
    columns = ["step", "call", "stage", "microbatch", "action", "start_ns", "dur_ns"]
    for power in count():
        shown = detailed[detailed % 2**power == 0] if (detailed % 2**power == 0).any() else detailed[:1]
        frame = steady_chunks.loc[steady_chunks["step"].isin(shown), columns]
        if len(shown) == 1 or (len(shown) <= _STEPS and len(frame) <= _MOST_ROWS):
            break
    return frame.astype({"action": "str"})


def inside_chunks(chunks: pd.DataFrame) -> iv.Intervals:
    """Return the time inside chunks."""
    return host.cover(chunks[chunks["action"] != SCHEDULE])


def _calls(chunks: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of schedule.step()."""
    return chunks[chunks["action"] == SCHEDULE]
