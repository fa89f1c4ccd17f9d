"""Tokens that ranks send to each other's experts, from the sizes of their all-to-alls, and what uneven shares cost.

A mixture-of-experts layer sends each token to the ranks of its experts (dispatch), runs the experts, and sends the
results back (combine). That is a pair of all-to-alls: the second returns, piece by piece, what the first received. The
backward pass sends gradients along the same routes. The sizes change from step to step with the tokens. Embedding
tables that are sharded over the ranks exchange in pairs too, but with the same sizes in every step.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from msgspec import Struct

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.communication.collectives import NO_SIZES, collectives, instances, matched, window_steps
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs, per_rank
from dlprof.analysis.step.partition import partition
from dlprof.analysis.timeline.steady import standard_error
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import DoesNotApply, NotMeasured

ALL_TO_ALL = "all_to_all"

# All-to-alls without sizes for each rank ("[]" in NCCL's metadata): everybody gets as much.
_EVEN = ">"

_COLUMNS = ("row", "step", "place", "pieces", "given", "got", "changes", "expert_ns")


class Balance(Struct, frozen=True):
    """Tokens over the ranks of a mixture of experts, in the traced steps, and what even shares would save.

    ranks: rank, expert (the rank's place in its group), tokens (received a step), count (dispatches a step), ratio (to
    the mean of its group), expert_ns (computation between dispatch and combine, a step), routed_ns (the part of it that
    grows with the tokens), wait_ns (for others in all-to-alls, a step; NaN: not known). uneven: the fullest rank's
    tokens ÷ the mean rank's, mean over all dispatches. layers: how many layers have one expert on each rank; 0: tokens
    per expert are not known, and `no_experts` says why.
    """

    ranks: pd.DataFrame
    uneven: float
    layers: int
    no_experts: str
    in_rows: bool  # tokens are known as such; else they are elements
    dispatches: float  # a step and rank
    saving_ns: float  # of the mean steady step
    noise_ns: float
    steps: int


@per_rank
def expert_lists(modules: Frame = needs(schema.MODULES)) -> pd.DataFrame:
    """Return how many experts the rank holds, a row for each list of them: path, experts.

    A list is a ModuleList whose name ends in "experts", as Mixtral, DeepSpeed and Megatron-LM's SequentialMLP call it.
    Raises NotMeasured where there is none: grouped experts are the stacked weights of one module.
    """
    rows = modules.drop_duplicates("path").astype({"path": "str", "kind": "str"})
    lists = rows.loc[(rows["kind"] == "ModuleList") & rows["path"].str.endswith("experts"), "path"]
    if not len(lists):
        raise NotMeasured("no recorded module is a list of experts (the weights of grouped experts are one module's)")
    inside = rows["path"].str.rpartition(".")[0].value_counts()
    return pd.DataFrame({"path": lists, "experts": inside.reindex(lists, fill_value=0).to_numpy()})


@per_rank
def dispatches(
    collectives: Frame = needs(collectives), partition: Maybe[dict[str, iv.Intervals]] = maybe(partition)
) -> pd.DataFrame:
    """Return the dispatches of the steady traced steps: all-to-alls whose pieces the next one sends back.

    Columns: row (its place among the rank's `collectives`), step, place (among those of its step), pieces, given and
    got (rows in all; elements where pieces are not known), changes (whether another step has other sizes there),
    expert_ns (computation until the next one begins).
    """
    frame = collectives.assign(row=np.arange(len(collectives)))
    frame = frame[(frame["collective"] == ALL_TO_ALL) & ~frame["pieces"].isin(("", _EVEN))]
    frame = frame.sort_values(["group", "members"], kind="stable", ignore_index=True)
    sides = frame["pieces"].str.partition(">")
    give, take = (sides[side].to_numpy(dtype=object) for side in (0, 2)) if len(frame) else (np.empty(0), np.empty(0))
    keys = frame[["step", "group", "members"]].to_numpy(dtype=object)
    back = np.zeros(len(frame), dtype=bool)  # whether the next one returns what this one received
    back[:-1] = (give[:-1] == take[1:]) & (take[:-1] == give[1:]) & (keys[:-1] == keys[1:]).all(axis=1)
    # The combine's gradients go where the dispatch went, so pairs form a chain: every second one begins a pair.
    chain = np.cumsum(~np.concatenate(([False], back[:-1]))) if len(frame) else np.empty(0, dtype=np.int64)
    first = back & (pd.Series(chain).groupby(chain).cumcount().to_numpy() % 2 == 0)
    at = np.flatnonzero(first)
    found = frame.iloc[at].reset_index(drop=True)
    found = found.assign(
        place=found.groupby("step").cumcount(),
        given=[_sum(text) for text in give[at]],
        got=[_sum(text) for text in take[at]],
    )
    computation = (partition.or_none() or {}).get("computation", iv.EMPTY)
    begin = frame["end_ns"].to_numpy()[at]
    until = np.maximum(frame["start_ns"].to_numpy()[at + 1], begin)
    return found.assign(
        changes=found.groupby("place")["pieces"].transform("nunique") > 1,
        expert_ns=iv.within(computation, begin, until),
    )[list(_COLUMNS)]


def _sum(text: str) -> int:
    return sum(map(int, text.split(",")))


@across_ranks
def routed(dispatches: Frame = needs(dispatches), collectives: Frame = needs(collectives)) -> pd.DataFrame:
    """Return the rows of `dispatches` if they send tokens to experts; raise NotMeasured or DoesNotApply if not.

    The router decides where tokens go: sizes change from step to step, and a rank receives more or less than it sends.
    """
    if dispatches["changes"].any() and (dispatches["given"] != dispatches["got"]).any():
        return dispatches
    exchanges = collectives[collectives["collective"] == ALL_TO_ALL]
    if not len(exchanges):
        raise DoesNotApply("the traced steps have no all-to-all: no tokens go to experts on other ranks")
    if (exchanges["pieces"] == "").any():
        raise NotMeasured(NO_SIZES)
    if collectives.groupby("rank")["step"].nunique().max() < 2:
        raise NotMeasured("one traced step does not show whether the sizes of its all-to-alls change with the tokens")
    raise DoesNotApply("the sizes of the all-to-alls do not change: no tokens go to experts on other ranks")


@across_ranks
def expert_balance(
    routed: Frame = needs(routed),
    collectives: Frame = needs(collectives),
    instances: Maybe[Frame] = maybe(instances),
    matched: Maybe[Frame] = maybe(matched),
    expert_lists: Maybe[Frame] = maybe(expert_lists),
    window_steps: Frame = needs(window_steps),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Balance:
    """Return how evenly tokens are spread over the ranks' experts.

    Saving: at each dispatch all ranks wait for the slowest rank's experts. If each rank got the mean number of tokens,
    the slowest would take less time, by its tokens above the mean × the time of a token. That time is the slope of a
    line through the times of all ranks' experts in that layer, so time that does not grow with the tokens (small
    kernels) stays. The saving is at most the longest wait of any rank in all-to-alls. Raises NotMeasured where ranks
    are missing.
    """
    pairs = instances.get()
    whole = pairs[(pairs["present"] == pairs["wanted"]) & (pairs["collective"] == ALL_TO_ALL)]
    # There a row counts from the first rank's first one, here from the rank's own.
    whole = whole.assign(row=collectives.groupby("rank").cumcount().to_numpy()[whole["row"]])
    frame = routed.merge(whole[["rank", "row", "instance", "group", "members"]], on=["rank", "row"])
    if not len(frame):
        raise NotMeasured(
            f"{len(job.missing_ranks)} of {job.world_size} ranks are missing: how many tokens they receive is not known"
        )
    mean, a_token = frame.groupby("instance")["got"].transform("mean"), _a_token(frame)
    frame = frame.assign(
        ratio=frame["got"] / mean.replace(0, np.nan),
        routed_ns=a_token * frame["got"],
        even_ns=frame["expert_ns"] - a_token * (frame["got"] - mean),
    )
    waits = _waits(matched, len(window_steps) / window_steps["rank"].nunique())
    steps = window_steps.groupby("rank").size()
    traced = float(window_steps["dur_ns"].mean())
    each = sorted(window_steps["step"].unique())
    shorter = np.array(_shorter(frame).reindex(each, fill_value=0.0).tolist())
    most = float(waits.max()) if len(waits) else np.inf
    scale = mean_step_ns / traced
    ranks = frame.groupby("rank").agg(
        ratio=("ratio", "mean"),
        count=("got", "size"),
        tokens=("got", "sum"),
        expert_ns=("expert_ns", "sum"),
        routed_ns=("routed_ns", "sum"),
    )
    for name in ("count", "tokens", "expert_ns", "routed_ns"):
        ranks[name] = ranks[name] / steps.reindex(ranks.index)
    ranks["wait_ns"] = waits.reindex(ranks.index)
    ranks["expert"] = _places(frame).reindex(ranks.index)
    layers, why = _one_each(expert_lists.or_none(), ranks.index.tolist())
    return Balance(
        ranks=ranks.reset_index(),
        layers=layers,
        no_experts=why,
        uneven=float(frame.groupby("instance")["ratio"].max().mean()),
        in_rows=bool(frame["pieces"].str.contains(",").all()),
        dispatches=float(ranks["count"].mean()),
        saving_ns=min(max(float(shorter.mean()), 0.0), most) * scale,
        noise_ns=standard_error(shorter) * scale,
        steps=len(shorter),
    )


def _places(frame: pd.DataFrame) -> pd.Series[int]:
    """Return each rank's place in its group; in the group of all ranks that is its number."""
    first = frame.drop_duplicates("rank")
    place = [
        names.index(str(rank)) if str(rank) in names else rank
        for rank, names in zip(first["rank"].tolist(), first["members"].astype("str").str.split(","), strict=True)
    ]
    return pd.Series(place, index=first["rank"].to_numpy(), dtype=np.int64)


def _one_each(lists: pd.DataFrame | None, ranks: list[int]) -> tuple[int, str]:
    """Return in how many layers each rank holds one expert; 0 where they hold more or it is not known, and why."""
    if lists is None or set(ranks) - set(lists["rank"]):
        return 0, "how many experts each rank holds is not known"
    most, layers = int(lists["experts"].max()), lists.groupby("rank").size()
    if most > 1:
        hold = "each rank holds" if lists["experts"].min() == most else "ranks hold up to"
        return 0, f"{hold} {most} experts of a layer"
    if layers.nunique() > 1 or (lists["experts"] < 1).any():
        return 0, "not every rank holds an expert of each layer"
    return int(layers.iloc[0]), ""


def _a_token(frame: pd.DataFrame) -> pd.Series[float]:
    """Return the time of one more token, ns, for each row: the slope of the line through its layer's times.

    At least 0, and at most the whole time ÷ the tokens.
    """
    tokens, ns = frame["got"].astype(float), frame["expert_ns"].astype(float)
    by = [frame["group"], frame["members"], frame["place"]]
    apart = tokens - tokens.groupby(by).transform("mean")
    both, square, all_ns, all_tokens = (
        of.groupby(by).transform("sum") for of in (apart * ns, apart * apart, ns, tokens)
    )
    slope = (both / square.replace(0.0, np.nan)).fillna(0.0)
    most = (all_ns / all_tokens.replace(0.0, np.nan)).fillna(0.0)
    return slope.clip(lower=0.0, upper=most)


def _shorter(frame: pd.DataFrame) -> pd.Series[float]:
    """Return by how much each step is shorter with even shares, ns; where groups run in parallel the slowest counts."""
    slowest = frame.groupby(["step", "group", "members", "instance"])[["expert_ns", "even_ns"]].max()
    steps = slowest.groupby(["step", "group", "members"]).sum().groupby("step").max()
    found: pd.Series[float] = (steps["expert_ns"] - steps["even_ns"]).clip(lower=0.0)
    return found


def _waits(matched: Maybe[pd.DataFrame], steps: float) -> pd.Series[float]:
    """Return how long each rank waits for others in all-to-alls, ns a traced step; empty where it is not known."""
    pairs = matched.or_none()
    if pairs is None:
        return pd.Series(dtype=float)
    found: pd.Series[float] = pairs[pairs["collective"] == ALL_TO_ALL].groupby("rank")["wait_ns"].sum() / steps
    return found


@per_rank
def destinations(
    dispatches: Frame = needs(dispatches),
    collectives: Frame = needs(collectives),
    window_steps: Frame = needs(window_steps),
) -> pd.DataFrame:
    """Return how many tokens the rank sends to each place in its group: members, to, tokens a step. Empty: unknown."""
    rows = dispatches.assign(members=collectives["members"].to_numpy()[dispatches["row"]])
    rows = rows.assign(give=rows["pieces"].str.partition(">")[0] if len(rows) else "")
    rows = rows[rows["give"].str.contains(",")]
    found = [
        pd.DataFrame(
            {"members": members, "tokens": np.array(of["give"].str.split(",").tolist(), dtype=float).sum(axis=0)}
        )
        for (members, _), of in rows.groupby(["members", rows["give"].str.count(",")])
    ]
    if not found:
        return pd.DataFrame({"members": [], "to": [], "tokens": []})
    return pd.concat([one.assign(to=one.index, tokens=one["tokens"] / len(window_steps)) for one in found])
