"""Each span of a trace by the module that it is for, and by its part of the step."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, within_rank
from dlprof.analysis.modules.exchanges import bucket_shares, buckets_of, common, frames_of_calls
from dlprof.analysis.modules.frames import COMMUNICATION, OTHER, PARTS, Frames, module_frames
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import TracedSteps, trace_window


@within_rank
def module_rows(
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    module_frames: Frames = needs(module_frames),
    bucket_shares: Maybe[NDArray[np.float64]] = maybe(bucket_shares),
    trace_window: TracedSteps = needs(trace_window),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return each span's module (a place in the paths of `module_frames`; −1: none), part of the step (one of PARTS),
    frame (a place in `module_frames`; −1: none) and bucket (a row of `bucket_shares`; −1: none), with the spans' index.

    Work on the host belongs to the innermost frame on its thread, work on a device to the frame of the call that
    launched it. A function of the backward pass belongs to the module whose forward pass created it, an exchange to the
    module whose parameters it moves, as far as that is known (exchanges.py), else to the model.

    Code from torch.compile belongs to the modules that its kernels were made of, where that is recorded; else as one
    piece to the module that calls it, as a CUDA graph's replay does.

    Raises NotMeasured where the trace has no names of modules.
    """
    lane, start = spans["lane"].cat.codes.to_numpy().astype(np.int64), spans["start_ns"].to_numpy()
    frame = np.full(len(spans), -1, dtype=np.int64)
    on_host = np.flatnonzero(~is_on_device)
    frame[on_host] = module_frames.at(lane[on_host], start[on_host])
    own = np.flatnonzero(module_frames.row >= 0)
    frame[module_frames.row[own]] = own
    on_device = np.flatnonzero(is_on_device & (spans["launch"].to_numpy() >= 0))
    frame[on_device] = _launched(spans, is_on_device, frame, spans["launch"].to_numpy()[on_device])
    # gloo's own threads run exchanges that another thread has issued.
    exchanged = np.flatnonzero(host.is_kind(spans, "communication"))
    frame[exchanged] = frames_of_calls(spans, exchanged[~is_on_device[exchanged]], frame)[exchanged]
    inside = frame >= 0
    module = np.where(inside, module_frames.module[np.maximum(frame, 0)], -1)
    part = np.where(inside, module_frames.part[np.maximum(frame, 0)], OTHER)

    gradients = exchanged[(frame[exchanged] >= 0) & module_frames.accumulates[frame[exchanged]]]
    model = module_frames.paths.index("") if "" in module_frames.paths else -1
    module[gradients], bucket = model, np.full(len(spans), -1, dtype=np.int64)
    shares = bucket_shares.or_none()
    if shares is not None:
        began = module_frames.start[frame[gradients]]
        wraps = [model.get("ddp") or {} for model in rank.facts.get("models") or ()]
        unused = any(one.get("find_unused_parameters") and not one.get("static_graph") for one in wraps)
        steps = trace_window.host[:, 0]
        bucket[gradients] = buckets_of(spans, gradients, began, steps, len(shares), finds_unused=unused)
        known = np.flatnonzero(bucket >= 0)
        module[known] = common(shares, module_frames.paths)[bucket[known]]
    part[exchanged] = COMMUNICATION
    kinds = pd.Categorical.from_codes(part.astype(np.int8), categories=pd.Index(PARTS))
    places = {name: of.astype(np.int32) for name, of in (("module", module), ("frame", frame), ("bucket", bucket))}
    return pd.DataFrame({"part": kinds, **places}, index=spans.index)


def _launched(
    spans: pd.DataFrame, is_on_device: NDArray[np.bool_], frame: NDArray[np.int64], launch: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the frame of the call with each number of a launch; −1: there is no such call."""
    ids = spans["launch"].to_numpy()
    calls = np.flatnonzero(host.is_kind(spans, "runtime") & ~is_on_device & (ids >= 0))
    if not len(calls):
        return np.full(len(launch), -1, dtype=np.int64)
    calls = calls[np.argsort(ids[calls], kind="stable")]
    at = calls[np.minimum(np.searchsorted(ids[calls], launch), len(calls) - 1)]
    return np.where(ids[at] == launch, frame[at], -1)
