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

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.data_parallel import unused_search
from dlprof.measures.replay import own_time, saving
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import duration, percent, size

# One keyword, so worth saying from where any finding is (diagnosis.LEAST_SHARE).
NOTABLE_SHARE = 0.02


def check(run: Measured) -> Finding | Clear:
    """Look at what the search takes, where DDP searches and has found nothing."""
    model = settings.model(run)
    ddp = model.get("ddp") or {}
    if model and not ddp:
        return Clear("the model is not in DistributedDataParallel")
    if "find_unused_parameters" not in ddp:
        raise NotMeasured("the settings of DistributedDataParallel were not recorded")
    if not ddp["find_unused_parameters"]:
        return Clear("DDP does not look for unused parameters")
    unused = ddp.get("unused_parameter_bytes")
    if unused is None:
        raise NotMeasured("DDP did not tell whether parameters were unused")
    if unused:
        return Clear(f"DDP looks for unused parameters, and there are some ({size(float(unused))})")
    frame = run.frame(unused_search)
    search, flags = by_rank(frame, "search_ns"), by_rank(frame, "flags_ns")
    gone = {r: search[r] + flags[r] for r in search}
    step = mean_step_ns(run)
    gain = saving(run, gone)
    if gain / step < NOTABLE_SHARE:
        return Clear(f"DDP looks for unused parameters and finds none, in {percent(gain / step)} of the step")
    worst = max(gone, key=lambda r: gone[r])
    parts = (("search of the graph", search[worst]), ("telling the other ranks", flags[worst]))
    return Finding(
        title="DDP looks for unused parameters, and there are none",
        summary=f"In every step rank {worst} searches the autograd graph for {duration(search[worst])}, and waits"
        f" {duration(flags[worst])} until all ranks have told what they used.",
        verdict=f"{percent(gain / step)} {of_step(run)} looks for unused parameters that do not exist.",
        noise_ns=float(frame["noise_ns"].max()),
        saving_ns=gain,
        advice=(
            "`DistributedDataParallel(..., find_unused_parameters=False)` (is True), if no step leaves a part of the"
            " model out",
        ),
        evidence=Panel("bars", f"What it takes in a step of rank {worst}", parts, unit="ns"),
        ranks=tuple(sorted(gone)),
        sure="As traced. DDP tells of every hundredth step: what is left out now and then may have been missed.",
    )


RULE = Rule(
    "unused_parameters",
    "Search for unused parameters",
    (own_time, step_means, unused_search),
    check,
    saves_from=("computation", "communication", "host"),
)
