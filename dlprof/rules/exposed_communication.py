"""Ranks exchange data while none of them computes.

Collectives cost nothing while computation runs beside them. Exposed are those that nothing hides: gradients reduced
after the backward pass instead of during it, many small collectives, or more bytes than the link can carry meanwhile.

Needs a trace with collectives. With the traces of all ranks, waiting for a late rank is told apart from transfer and
left to `straggler`; where a rank's trace is missing, the two cannot be told apart and the summary says so.

Saving: the best of what one change can give: the exposed transfer hidden, as far as there is computation to hide it
behind; or half as many bytes, which halves it. Where both are done, what is left is less.

What to change: let DDP or FSDP overlap the exchange with the backward pass; larger buckets where collectives are many
and small; `no_sync()` while gradients accumulate; compressed gradients (`fp16_compress_hook`); NCCL, not gloo, on GPUs.
"""

from __future__ import annotations

import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.breakdown import breakdown, part, part_noise
from dlprof.measures.collectives import collectives
from dlprof.measures.replay import own_time, saving
from dlprof.measures.steps import mean_step_ns, of_step, step_means
from dlprof.result import Finding, Panel
from dlprof.units import count, duration, percent, size

# Notable, high and severe are 5, 10 and 30 % with the analysis tools that grade it; it speaks from the first on.
NOTABLE_SHARE = 0.05

# DDP's buckets hold 25 MB unless told otherwise; collectives below a tenth of that are dominated by their start.
SMALL_BYTES = 2_500_000


def check(run: Measured) -> Finding | Clear:
    """Look at what is exposed of the collectives, and how much of that is transfer."""
    frame = run.frame(collectives)
    if not len(frame):
        raise NotMeasured(
            "one rank: nothing to exchange" if run.world_size < 2 else "no collectives in the traced steps"
        )
    own = run.frame(own_time).set_index("rank")
    exposed = pd.Series(part(run, "communication"), dtype=float).reindex(own.index).fillna(0.0)
    transfer = (exposed - own["wait_ns"]).clip(lower=0.0)
    split = bool(own["known"].all())
    step = mean_step_ns(run)
    gains = _gains(run, transfer if split else transfer * 0.0 + float(exposed.min()))
    gain = max(gains.values())
    share = gain / step
    if share < NOTABLE_SHARE:
        waiting = f"; {percent(own['wait_ns'].max() / step)} waits for other ranks" if split else ""
        return Clear(f"{percent(share)} of the step is exposed transfer{waiting}")
    worst = int(str(transfer.idxmax()))
    per_step = len(frame[frame["rank"] == worst]) / _traced(run, worst)
    waits = (
        f", {duration(own['wait_ns'][worst])} more waits for other ranks" if split and own["wait_ns"][worst] > 0 else ""
    )
    unsplit = "" if split else " Part of it may be waiting for a late rank: not every rank's trace is here."
    return Finding(
        title="Communication is not hidden behind computation",
        summary=f"{count(per_step, 'collective')} a step on rank {worst}; for {duration(transfer[worst])} of"
        f" {duration(step)} data is in transfer and nothing is computed{waits}.{unsplit}",
        verdict=f"{percent(share)} {of_step(run)} is communication that nothing hides.",
        noise_ns=part_noise(run, "communication"),
        saving_ns=gain,
        advice=(*_advice(run, frame[frame["rank"] == worst], per_step), _predicted(gains)),
        evidence=_evidence(run, frame, worst),
        ranks=tuple(sorted(int(r) for r in transfer[transfer >= transfer.max() / 2].index)),
        sure="Estimated as the exposed transfer "
        + ("hidden behind computation." if gains["hidden"] >= gain else "halved: there is little to hide it behind.")
        + unsplit,
    )


def _gains(run: Measured, transfer: pd.Series[float]) -> dict[str, float]:
    """Give what each change saves of the mean step, ns: the transfer hidden, or half as many bytes (or exchanges)."""
    computed = part(run, "computation")
    hidden = {int(str(r)): min(float(t), computed.get(int(str(r)), 0.0)) for r, t in transfer.items()}
    half = {int(str(r)): float(t) / 2 for r, t in transfer.items()}
    return {"hidden": saving(run, hidden), "half": saving(run, half)}


def _predicted(gains: dict[str, float]) -> str:
    return (
        f"predicted: {duration(gains['hidden'])} less a step if all that computation has room for is hidden behind it,"
        f" {duration(gains['half'])} with half the bytes or, accumulating over two steps, half the exchanges"
    )


def _traced(run: Measured, rank: int) -> int:
    means = run.frame(step_means).set_index("rank")
    return max(int(means["traced_steps"][rank]), 1)


def _advice(run: Measured, mine: pd.DataFrame, per_step: float) -> tuple[str, ...]:
    ddp, fsdp = settings.model(run).get("ddp"), settings.model(run).get("fsdp")
    sized = mine["bytes"][mine["bytes"] > 0]
    advice = []
    if per_step > 8 and len(sized) and sized.median() < SMALL_BYTES:
        what = f"{per_step:.0f} collectives of {size(float(sized.median()))} (median) a step"
        if ddp:
            advice.append(f"larger buckets: {what}; `bucket_cap_mb=25` or more (is {ddp.get('bucket_cap_mb')})")
        elif fsdp:
            advice.append(f"larger shards: {what}; `fully_shard` whole blocks, not single layers")
        else:
            advice.append(
                f"{what}: exchange gradients in large buckets during the backward pass (`DistributedDataParallel`)"
            )
    elif not ddp and not fsdp and settings.model(run):
        advice.append("`DistributedDataParallel` or FSDP2 (`fully_shard`): they exchange during the backward pass")
    if ddp and ddp.get("find_unused_parameters"):
        advice.append("`find_unused_parameters=False` (is True) unless some are unused: it delays the exchange")
    if any(f.get("backend") == "gloo" and (f.get("device") or {}).get("type") == "cuda" for f in run.facts.values()):
        advice.append("`init_process_group('nccl')` (is gloo): gloo sends GPU tensors through the host")
    if fsdp:
        advice.append("`fully_shard(..., reshard_after_forward=False)` where memory allows: no second all-gather")
        advice.append("half the bytes: `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)`")
    if ddp:
        advice.append(
            "half the bytes: `model.register_comm_hook(None, fp16_compress_hook)`; fewer exchanges: `no_sync()`"
        )
    return tuple(advice) or (
        "overlap the exchange with computation, or exchange less: larger buckets, fewer and shorter",
    )


def _evidence(run: Measured, frame: pd.DataFrame, rank: int) -> Panel:
    steps = _traced(run, rank)
    mine = frame[frame["rank"] == rank].assign(dur=lambda f: f["end_ns"] - f["start_ns"])
    rows = []
    for name, group in mine.groupby("collective"):
        sized = group["bytes"][group["bytes"] >= 0]
        rows.append(
            (
                str(name) or "–",
                round(len(group) / steps, 1),
                size(float(sized.mean())) if len(sized) else "–",
                duration(float(group["dur"].mean())),
                duration(float(group["dur"].sum()) / steps),
            )
        )
    rows.sort(key=lambda r: str(r[0]))
    columns = ("collective", "a step", "mean bytes", "mean time", "time a step")
    note = "Times are from start to end, waiting for other ranks and hidden time included; those at once count twice."
    return Panel("table", f"Collectives of a step on rank {rank}", tuple(rows), columns, note=note)


RULE = Rule(
    "exposed_communication",
    "Communication that nothing hides",
    (breakdown, collectives, own_time, step_means),
    check,
    saves_from=("communication",),
)
