"""Panels of what ranks exchange: collectives, tokens of experts, and the micro-batches of a pipeline."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.communication.bandwidth import bandwidth, exchanged, size_class
from dlprof.analysis.communication.collectives import SENT, unmatched
from dlprof.analysis.communication.experts import Balance, destinations, expert_balance, routed
from dlprof.analysis.communication.recorder import rank_places, whole_calls
from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.panel import MOST_RANKS, Picture, table
from dlprof.analysis.pipeline.chunks import SCHEDULE, pipeline_chunks
from dlprof.analysis.pipeline.pipeline_plans import schedules
from dlprof.analysis.pipeline.pipes import bubbles, stage_lengths
from dlprof.analysis.pipeline.schedules import short
from dlprof.analysis.timeline import host
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import count, duration

MOST_ROWS = 40

_COLLECTIVES_COLUMNS = {
    "name": "collective",
    "ranks": "ranks",
    "class_": "size of each",
    "count": "calls a step",
    "bytes": "data a step_bytes",
    "wait_ns": "waiting_ns",
    "transfer_ns": "transfer_ns",
    "algbw": "algorithm bandwidth per second_bytes",
    "busbw": "bus bandwidth per second_bytes",
    "of_peak": "link's peak_share",
    "culprit": "last rank",
    "late": "came last in",
    "matched": "of",
}


def draw_collectives(
    exchanged: Frame = needs(exchanged), unmatched: str = needs(unmatched), bandwidth: Frame = needs(bandwidth)
) -> list[Panel]:
    """List the collectives by kind, ranks and size, the longest first; groups of as many ranks are one row."""
    known = exchanged["culprit"] >= 0
    shown = exchanged.assign(
        name=[_name(*of) for of in zip(exchanged["collective"], exchanged["groups"], strict=True)],
        class_=exchanged["size"].map(size_class),
        ranks=exchanged["ranks"].astype("Int64").where(exchanged["ranks"] > 0),
        **{name: exchanged[name].astype("Int64").where(known) for name in ("culprit", "late", "matched")},
    )
    note = (
        "Per step and rank, hidden time included. Transfer is the least time over the ranks (of what is sent, the"
        " receiver's from when both had come); bytes over it is the algorithm's bandwidth, and the bus bandwidth is"
        " what that asks of each link (nccl-tests' factors)."
    )
    if exchanged["wait_ns"].isna().any():
        note += " Not every rank's trace is here or matches: transfer may include waiting, and takes at most this long."
    if unmatched:
        note += f" Not in it: {unmatched}."
    if exchanged["of_peak"].isna().all() and bandwidth["peak"].isna().all():
        note += " What the link could carry is not known."
    if len(exchanged) > MOST_ROWS:
        note += f" The longest {MOST_ROWS} of {len(exchanged)}."
    return [table("Collectives", shown, _COLLECTIVES_COLUMNS, MOST_ROWS, note)]


def _name(kind: str, groups: int) -> str:
    if kind == SENT:
        return "send and receive" + (f" in {groups} directions" if groups > 1 else "")
    return (kind or "unknown") + (f" in {groups} groups" if groups > 1 else "")


COLLECTIVES_PICTURE = Picture(draw_collectives)

MOST = 64  # ranks that are listed

_PLACES = {"rank": "rank", "doing": "it", "what": "collective", "state": "state", "input": "sizes", "site": "at"}
_PLACES |= {"when": "since, UTC"}
_KINDS = {"named": "group", "op": "collective", "calls": "calls", "ranks": "ranks", "input": "sizes, most often"}


def places_table(rank_places: Frame) -> Panel:
    """List the ranks with what they wait in."""
    return table("Where each rank is, by its flight recorder", rank_places, _PLACES, most=MOST)


def draw_flight_recorder(
    rank_places: Frame = needs(rank_places), whole_calls: Frame = needs(whole_calls)
) -> list[Panel]:
    """List the ranks with what they wait in, and which collectives the recorders hold."""
    kinds = whole_calls.groupby(["named", "op"], sort=False, as_index=False).agg(
        calls=("sequence", "size"), ranks=("rank", "nunique"), input=("input", lambda sizes: sizes.mode().iloc[0])
    )
    kinds = kinds.sort_values("calls", ascending=False, kind="stable")
    return [places_table(rank_places), table("Collectives in the flight recorders", kinds, _KINDS, most=MOST)]


FLIGHT_RECORDER_PICTURE = Picture(draw_flight_recorder)

LEAST_GAP = 1 / 500  # of the step: a shorter gap between two chunks is only their handing over

_MOST_ROWS = 4 * MOST_RANKS

_BUBBLES = {c: c for c in ("rank", "idle_ns", "schedule_ns", "imbalance_ns")} | {
    "communication_ns": "handing over_ns",
    "launch_ns": "launching_ns",
    "bubble": "bubble_share",
    "simulated": "simulated_share",
    "scheduled": "even stages_share",
    "closed": "formula_share",
}

_HELD = {"schedule": "schedule", "idle": "idle_share", "activations": "activations_share"}
_HELD |= {"weights": "copies of the weights", "how": "how"}


_STAGES = {c: c for c in ("stage", "rank", "forward_ns", "backward_ns")} | {"relative": "of the mean stage_times"}


def draw_pipeline(
    bubbles: Frame = needs(bubbles),
    pipeline_chunks: Maybe[Frame] = maybe(pipeline_chunks),
    stage_lengths: Maybe[Frame] = maybe(stage_lengths),
) -> list[Panel]:
    """Draw one step of the first pipeline, and tabulate every rank's bubble and its causes, and the stages' lengths."""
    chunks, stages = pipeline_chunks.or_none(), stage_lengths.or_none()
    return [
        *([] if chunks is None else [gantt(bubbles, chunks, bubbles["ranks"].iloc[0])]),
        _bubbles(bubbles),
        *([] if stages is None else [_stages(stages)]),
        _schedules(bubbles),
    ]


def gantt(bubbles: pd.DataFrame, pipeline_chunks: pd.DataFrame, ranks: str) -> Panel:
    """Draw one step of the pipeline of some ranks, as `pipeline` has them: a lane a stage, and what it worked on."""
    mine = bubbles[bubbles["ranks"] == ranks]
    frame = pipeline_chunks[pipeline_chunks["rank"].isin(mine["rank"])]
    frame = frame[(frame["action"] != SCHEDULE) & (frame["call"] == 0)]
    # The first step that most ranks have; where there are many ranks, each writes fewer.
    step = frame.groupby("step")["rank"].nunique().idxmax()
    frame = frame[frame["step"] == step].sort_values(["stage", "start_ns"], kind="stable")
    frame = frame.assign(start_ns=frame["start_ns"] - frame["start_ns"].min())
    columns = ["stage", "rank", "start_ns", "dur_ns", "microbatch", "action"]
    rows = [
        (_lane(*at), start, dur, str(which) if which >= 0 else action, action)
        for *at, start, dur, which, action in frame[columns].itertuples(index=False, name=None)
    ]
    pipelines = bubbles["ranks"].nunique()
    note = f"One of {pipelines} pipelines that run side by side." if pipelines > 1 else ""
    title = f"Pipeline, {short(mine['schedule'].iloc[0])}: the micro-batches of step {step}"
    return Panel("timeline", title, (*rows, *_idle(frame)), unit="ns", note=note)


def _idle(frame: pd.DataFrame) -> list[tuple[str, int, int, str, str]]:
    """Return what is between chunks: where a rank works on none of its stages, each of their lanes has its bubble."""
    frame = frame[frame["stage"] >= 0]
    end = int((frame["start_ns"] + frame["dur_ns"]).max())
    step, rows = np.array([[0, end]], dtype=np.int64), []
    for rank, mine in frame.groupby("rank"):
        gaps = [(a, b - a) for a, b in iv.subtract(step, host.cover(mine)).tolist() if b - a >= LEAST_GAP * end]
        for stage in np.unique(mine["stage"]):
            rows += [(_lane(stage, rank), *gap, "bubble", "pipeline_bubble") for gap in gaps]
    return rows


def _lane(stage: int, rank: object) -> str:
    return f"stage {stage} · rank {rank}"


def _bubbles(bubbles: pd.DataFrame) -> Panel:
    frame = bubbles.sort_values(["ranks", "rank"]).assign(idle_ns=bubbles["step_ns"] * bubbles["bubble"])
    first = frame.iloc[0]
    note = (
        f"{short(first['schedule'])}, {count(int(first['microbatches']), 'micro-batch')},"
        f" {count(int(first['chunks']), 'stage')} a rank, a step of {duration(first['step_ns'])}. The idle time is the"
        " sum of the four columns after it; a stage longer than the others is idle for less, and its imbalance is"
        " negative. The bubble is the idle share: measured; simulated with the measured chunks, launching and handing"
        " over for nothing; the same with stages and micro-batches alike; by the formula of the schedule."
        f"{_first(len(frame), 'ranks')}"
    )
    return table("Pipeline bubbles", frame, _BUBBLES, _MOST_ROWS, note)


def _stages(stage_lengths: pd.DataFrame) -> Panel:
    frame = stage_lengths[stage_lengths["ranks"] == stage_lengths["ranks"].iloc[0]]
    frame = frame.assign(relative=frame["stage_ns"] / (frame["stage_ns"].mean() or np.nan))
    saved = max(0.0, float(frame["saved_ns"].iloc[0]))
    note = f"The mean of a micro-batch. Replayed with even stages, the step would be {duration(saved)} shorter."
    return table("Pipeline stages", frame, _STAGES, _MOST_ROWS, note + _first(len(frame), "stages"))


def _schedules(bubbles: pd.DataFrame) -> Panel:
    first = bubbles.iloc[0]
    ranks, microbatches = int(first["size"]), int(first["microbatches"])
    note = (
        "Of stages alike, a backward pass twice as long as the forward pass, and handing over for nothing. Activations:"
        " the most that a rank holds, as a share of what its layers leave of a whole batch; a schedule with several"
        " stages a rank has two here. Replayed from the grid that torch runs; closed forms are Li and Hoefler's"
        " (Chimera, 2021) of schedules that torch does not run."
    )
    title = f"What schedules leave idle and hold, {count(ranks, 'rank')} and {count(microbatches, 'micro-batch')}"
    return table(title, schedules(ranks, microbatches), _HELD, note=note)


def _first(there: int, what: str) -> str:
    return f" The first {_MOST_ROWS} of {there} {what}." if there > _MOST_ROWS else ""


PIPELINE_PICTURE = Picture(draw_pipeline)

# If there are more ranks, those with most tokens are shown.
MOST_RECEIVERS = 32

_SENT = {"rank": "rank", "tokens": "tokens a step", "ratio": "of the mean_times"}


def tokens_of(found: Balance) -> Panel:
    """Return the tokens that each rank receives, most first; of each expert where every rank holds one of a layer."""
    what = "tokens" if found.in_rows else "elements"
    columns = {"expert": "expert"} if found.layers else {}
    columns |= {
        "rank": "rank",
        "each": f"{what} a dispatch",
        "ratio": "of the mean_times",
        "expert_ns": "computation between dispatch and combine_ns",
        "wait_ns": "waits in all-to-alls_ns",
    }
    note = (
        f"Mean of the traced steps, with {found.dispatches:,.0f} dispatches a step: the all-to-alls that send tokens to"
        " experts in the forward pass, and their gradients in the backward pass. In the mean dispatch the fullest rank"
        f" gets {found.uneven:.2f} × the mean rank's {what}. "
    )
    if found.layers:
        if found.layers == 1:
            note += f"Each rank holds one expert, so its {what} are that expert's."
        else:
            note += f"Each rank holds one expert of each of {found.layers} layers; a row is the mean of these layers."
    else:
        note += (
            f"The sizes of the all-to-alls show {what} per rank. Tokens per expert are not in the trace:"
            f" {found.no_experts}."
        )
    if len(found.ranks) > MOST_RECEIVERS:
        note += f" The {MOST_RECEIVERS} ranks with most of {len(found.ranks)}."
    ranks = found.ranks.assign(each=found.ranks["tokens"] / found.ranks["count"])
    title = f"{what.capitalize()} per {'expert' if found.layers else 'rank'}"
    return table(title, ranks.sort_values("ratio", ascending=False, kind="stable"), columns, MOST_RECEIVERS, note)


def draw_experts(
    expert_balance: Maybe[Balance] = maybe(expert_balance),
    destinations: Frame = needs(destinations),
    routed: Frame = needs(routed),
) -> list[Panel]:
    """List what each rank receives; where ranks are missing, what the recorded ones send to each rank."""
    found = expert_balance.or_none()
    if found is not None:
        return [tokens_of(found)]
    sent = destinations[destinations["rank"].isin(routed["rank"])]
    if not len(sent):
        raise NotMeasured("how many tokens go to which rank is not known")
    by = sent.groupby(["members", "to"])["tokens"].sum().reset_index()
    names = [
        int(members.split(",")[to]) if members else to for members, to in zip(by["members"], by["to"], strict=True)
    ]
    mean = by.groupby("members")["tokens"].transform("mean")
    shown = pd.DataFrame({"rank": names, "tokens": by["tokens"], "ratio": by["tokens"] / mean})
    senders = sent["rank"].nunique()
    note = (
        f"What {count(senders, 'recorded rank')} sent in a traced step, forward and backward pass together. What the"
        " other ranks sent is not known. The sizes of the all-to-alls show tokens per rank, not per expert."
    )
    return [table("Tokens sent to each rank", shown.sort_values("ratio", ascending=False), _SENT, MOST_RECEIVERS, note)]


EXPERTS_PICTURE = Picture(draw_experts)
