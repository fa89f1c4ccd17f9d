"""One process drives several GPUs with nn.DataParallel.

In every step it copies the whole model from the first GPU to the others, divides the batch, gathers all outputs on the
first GPU, and adds up all gradients there. Its threads share one Python interpreter, so they launch in turn. None of
the copying is hidden. DistributedDataParallel has a process a GPU, keeps the models alike by their gradients alone,
and reduces those while the backward pass still runs; PyTorch's manual recommends it even on one machine.

Needs a trace that holds `DataParallel.forward`.

Saving: the traced steps replayed without the copying. The all-reduce that takes its place, at the speed of the traced
reduction, is hidden behind the backward pass but for what takes longer than that, and for its last bucket, as far as
that is known; what the threads cost each other is not included.

What to change: `torchrun --nproc-per-node GPUS`, `DistributedDataParallel(model, device_ids=[local_rank])` and a
`DistributedSampler`; the batch size is then a GPU's, not the sum.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.communication.wrappers import replication
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Panel
from dlprof.units import duration

# The change is larger than a keyword: worth it from where exposed communication is notable.
NOTABLE_SHARE = 0.05


def check(
    replication: Maybe[Frame] = maybe(replication), own_time: Maybe[Frame] = maybe(own_time), job: Job = needs(JOB)
) -> Estimate:
    model = settings.model(job)
    if model and not model.get("data_parallel"):
        raise DoesNotApply("the model is not in nn.DataParallel")
    if not model and any(f.get("world_size", 1) > 1 for f in job.trace_facts.values()):
        raise DoesNotApply("each rank is a process of its own, not a replica of nn.DataParallel")
    frame = replication.get().set_index("rank")
    last, whole = model.get("last_bucket_bytes"), model.get("parameter_bytes")
    last_bucket = min(last / whole, 1.0) if last and whole else 0.0  # its share of the gradients; nothing hides it
    reduced = (frame["reduced_ns"] - frame["backward_ns"]).clip(lower=last_bucket * frame["reduced_ns"])
    gain = saving(own_time.get(), frame["gain_ns"] - reduced)
    if not gain:
        raise NotMeasured("nn.DataParallel has one device to work on, or its copying was not traced")
    return Estimate(
        saving_ns=gain,
        by_rank_ns=by_rank(replication.get(), "copying_ns"),
        noise_ns=float(frame["noise_ns"].max()),
        loses="is spent copying the model between GPUs (nn.DataParallel)",
    )


def explain(
    estimate: Estimate, replication: Frame = needs(replication), mean_step_ns: float = needs(mean_step_ns)
) -> Explanation:
    rank, copying = estimate.worst, estimate.by_rank_ns[estimate.worst]
    inside = float(estimate.rows(replication)["forward_ns"].iloc[0])
    parts = (("the host, inside DataParallel's forward", inside), ("copying, in forward and backward", copying))
    torchrun = "`DistributedDataParallel` under `torchrun --nproc-per-node GPUS`, with a `DistributedSampler`"
    return Explanation(
        title="One process drives several GPUs",
        summary=f"nn.DataParallel spreads the model and the batch, and gathers outputs and gradients, for"
        f" {duration(copying)} of {duration(mean_step_ns)}.",
        changes=(change(torchrun),),
        evidence=Panel("bars", f"nn.DataParallel in a step of rank {rank}", parts, unit="ns"),
        sure="Estimated by replaying the traced steps without the copying; not measured against"
        " DistributedDataParallel.",
    )


_SAVES_FROM = ("computation", "communication", "copy", "host", "other")
RULE = Rule("Several GPUs in one process", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE)
