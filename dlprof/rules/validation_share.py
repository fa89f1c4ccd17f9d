"""Much of the job's time goes to validation.

Between the training steps the model is evaluated on held-out data. No step becomes shorter by doing that less often or
faster, but the job does.

Needs the light layer, in which steps without a backward pass and without an optimizer's step are validation, and two
phases of it: of one alone nobody knows how often it comes.

Saving: what validating half as often would save; where one rank validates while others wait, or each rank validates the
whole set, what sharing it out would save. This time is not in the steady steps: it is spread over the training steps,
and its share is that of the training loop.

What to change: validate less often, or on a fixed part of the data and on all of it only now and then; share it out
over the ranks; `torch.inference_mode()` and the training's autocast; a larger batch than in training, since nothing is
kept for a backward pass; as many loader workers as for training.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.validation import validation
from dlprof.measures.whole_job import loop_step_ns, training_steps, whole_job
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import step_means
from dlprof.units import count, digits, duration, percent

# Validation must be, so it is worth a word only where doing something about it gives what tools for input call notable:
# 5 % (XProf). Validating half as often gives that from 10 % of the loop on.
NOTABLE_SHARE = 0.05

# More than this of validation in the loader is called high by the same tools.
WAITS = 0.2


def check(run: Measured) -> Finding | Clear:
    """Look at what validation takes of the training loop, and at what less of it would give."""
    frame = run.frame(validation).set_index("rank")
    if not frame["phases"].sum():
        return Clear("nothing was validated")
    most = int(frame["phases"].max())
    if most < 2:
        raise NotMeasured("one phase of validation was recorded: how often it comes is not known")
    steps = training_steps(run).reindex(frame.index)
    takes = frame["phases"] * frame["phase_ns"] / steps
    loop = loop_step_ns(run)
    # Where one rank validates the others wait for it, so the one that takes longest counts for all.
    worst = int(str(takes.idxmax()))
    told = frame.to_dict("index")[worst]
    shared, why = _alone(run, frame, told)
    part = 1 - 1 / shared if shared > 1 else 0.5
    gain = float(takes[worst]) * part
    if gain / loop < NOTABLE_SHARE:
        return Clear(f"{percent(float(takes[worst]) / loop)} of the training loop's time is validation")
    return Finding(
        title=f"Validation takes {percent(float(takes[worst]) / loop)} of the training loop's time",
        summary=f"Every {digits(told['every'])} training steps rank {worst} validates for {duration(told['phase_ns'])},"
        f" in {count(told['fetches'], 'batch')}; {percent(told['fetch_share'])} of it waits for data.{why}",
        verdict=f"{percent(float(takes[worst]) / loop)} of the training loop's time is validation.",
        scope="job",
        saving_ns=gain,
        noise_ns=float(told["noise_ns"] * told["phases"] / steps[worst]) * part,
        advice=_advice(run, worst, told, shared),
        evidence=_evidence(takes[worst], told, loop, shared),
        ranks=tuple(sorted(int(str(r)) for r in frame.index[frame["phases"] > 0])),
        sure="Measured over the whole job; "
        + (f"estimated as shared out evenly over {shared} ranks." if shared > 1 else "estimated as half of it gone.")
        + " A job that validates less often than the recorded part of it has less to gain.",
    )


def _setting(run: Measured, rank: int) -> dict[str, Any]:
    loaders = run.facts[rank].get("loaders") or []
    return next((dict(x) for x in loaders if x.get("role") == "validation"), {})


def _alone(run: Measured, frame: pd.DataFrame, told: dict[Any, Any]) -> tuple[int, str]:
    """Give over how many ranks validation could be shared out that is not, and say so; 1: it is, or nobody knows."""
    here, world = len(run.ranks), run.world_size
    silent = int((frame["phases"] == 0).sum())
    if world > 1 and here == world and silent == here - 1:
        return world, " The other ranks wait for it."
    loader = _setting(run, int(str(frame["phases"].idxmax())))
    size, samples = loader.get("batch_size"), loader.get("dataset_length")
    if world > 1 and size and samples and told["fetches"] >= samples // size:
        return world, f" Each rank goes through all of its {samples:,} samples."
    return 1, ""


def _advice(run: Measured, rank: int, told: dict[Any, Any], shared: int) -> tuple[str, ...]:
    advice = []
    loader = _setting(run, rank)
    if shared > 1:
        advice.append(
            f"share it out over the {shared} ranks: `DistributedSampler(validation_set, shuffle=False)`, and"
            " `all_reduce` the sums"
        )
    advice.append(f"validate every {2 * told['every']:.0f} steps (is {digits(told['every'])}), or on part of the data")
    if told["fetch_share"] > WAITS:
        now = f" (is {loader['num_workers']})" if loader.get("num_workers") is not None else ""
        advice.append(
            f"more `num_workers`{now} and `persistent_workers=True` on validation's loader:"
            f" {percent(told['fetch_share'])} of validation waits for it"
        )
    autocast = run.facts[rank].get("autocast") or {}
    mixed = f" and autocast ({autocast['dtype']}, as training)" if autocast.get("enabled") else ""
    size = f" (is {loader['batch_size']})" if loader.get("batch_size") else ""
    advice.append(f"`torch.inference_mode()`{mixed}; a larger batch{size}, since nothing is kept for a backward pass")
    return tuple(advice)


def _evidence(takes: float, told: dict[Any, Any], loop: float, shared: int) -> Panel:
    def row(change: str, gone: float) -> tuple[str, str, str, str]:
        share = takes * gone / loop
        return change, percent((takes - takes * gone) / loop), percent(share), f"{1 / (1 - share):.2f} ×"

    rows = [row("as it is", 0.0), row("half as often", 0.5), row("a quarter as often", 0.75)]
    if shared > 1:
        rows.insert(1, row(f"shared out over {shared} ranks", 1 - 1 / shared))
    if told["fetch_share"] > WAITS:
        rows.append(row("with no waiting for data", told["fetch_share"]))
    columns = ("validation", "share of the loop", "gone", "speed of the job")
    return Panel("table", "What less validation would give", tuple(rows), columns)


RULE = Rule("validation_share", "Time for validation", (step_means, validation, whole_job), check)
