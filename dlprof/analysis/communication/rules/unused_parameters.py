"""DDP looks in every step for parameters that get no gradient, and there are none.

With `find_unused_parameters=True` DDP goes through the whole autograd graph after each forward pass, and reduces over
all ranks which parameters were used. It needs that only where a part of the model is left out of some steps. It also
keeps the buckets in the order of the model's definition, where it would else put them in the order in which gradients
come, so that less of the communication is hidden.

Needs the settings that dlprof records of DDP, with what DDP itself found, and a trace.

Saving: the search, and the part of that reduction that nothing hides. What better buckets hide is not in it.

What to change: `find_unused_parameters=False`. Where parameters are unused in the same way in every step: freeze them
(`requires_grad_(False)`), or `static_graph=True`.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import ONE_RANK
from dlprof.analysis.communication.wrappers import unused_search
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Panel
from dlprof.units import duration, size


def check(unused_search: Maybe[Frame] = maybe(unused_search), job: Job = needs(JOB)) -> Estimate:
    model = settings.model(job)
    ddp = model.get("ddp") or {}
    if model and not ddp:
        raise DoesNotApply("the model is not in DistributedDataParallel")
    if "find_unused_parameters" not in ddp:
        if job.world_size < 2:
            raise DoesNotApply(ONE_RANK)
        raise NotMeasured("the settings of DistributedDataParallel were not recorded (record with `dlprof wrap`)")
    if not ddp["find_unused_parameters"]:
        return nothing("DDP does not look for unused parameters")
    unused = ddp.get("unused_parameter_bytes")
    if unused is None:
        raise NotMeasured("this torch does not report whether DDP found unused parameters")
    if unused:
        return nothing(f"DDP looks for unused parameters, and there are some ({size(float(unused))})")
    frame = unused_search.get()
    return Estimate(
        gone_ns=by_rank(frame.assign(ns=frame["search_ns"] + frame["flags_ns"]), "ns"),
        noise_ns=float(frame["noise_ns"].max()),
        loses="is spent looking for unused parameters that do not exist",
    )


def explain(estimate: Estimate, unused_search: Frame = needs(unused_search)) -> Explanation:
    rank = estimate.worst
    search, flags = map(float, estimate.rows(unused_search)[["search_ns", "flags_ns"]].iloc[0])
    parts = (("search of the graph", search), ("sharing it with the other ranks", flags))
    text = "`DistributedDataParallel(..., find_unused_parameters=False)` (is True), if every step uses the whole model"
    return Explanation(
        title="DDP looks for unused parameters, and there are none",
        summary=f"In every step rank {rank} searches the autograd graph for {duration(search)}, and waits"
        f" {duration(flags)} until all ranks have shared what they used.",
        changes=(change(text, find_unused_parameters=(True, False)),),
        evidence=Panel("bars", f"What it takes in a step of rank {rank}", parts, unit="ns"),
        sure="As traced. DDP checks every hundredth step: what is left out now and then may have been missed.",
    )


_SAVES_FROM = ("computation", "communication", "host")
RULE = Rule("Search for unused parameters", check, explain, _SAVES_FROM)
