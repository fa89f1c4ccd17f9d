"""A loop over parameters or samples calls small operators one by one, and the device waits for them.

A norm of each gradient, a moving average kept parameter by parameter, a loss image by image: hundreds of operators of a
few µs between two phases of the step. The host takes some 10 µs to call and launch each, however little the device
computes. Where it reads each result (`.item()`), it waits for the device every time as well.

Needs a trace of a GPU that links launches to kernels. A loop is the time between two phases in which an operator that
launches work is called 16 times or more; so are that many hooks of the backward pass that each read a value. What the
backward pass does for it is part of it: then it is one over samples, if it does not turn as often as the optimizer has
parameters. Loops inside a model's forward pass and inside an optimizer's step are not looked for here.

Saving: the traced steps replayed with a twentieth of the loop on the host, without its waits, and with its kernels that
move the same bytes without the start of each: then the host runs ahead again.

What to change: one call for all tensors: `torch.nn.utils.get_total_norm` and `clip_grad_norm_`, functions of
`torch._foreach_*`, `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`; and read values every k steps. Of
samples: all of the batch at once, padded to the longest and masked.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import waits
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.gaps import HOOK, HOST, SAVES_FROM
from dlprof.analysis.host.parts import LOOP, gains_of, host_parts, places_of
from dlprof.analysis.host.stacks import hottest
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import call_sites
from dlprof.analysis.source.patches import Call
from dlprof.result import Change
from dlprof.units import digits, duration

_AFTER = {
    "fetch": "before the forward pass",
    "forward": "between the forward and the backward pass",
    "backward": "between the backward pass and the optimizer",
    "optimizer": "after the optimizer's step",
    HOOK: "in hooks of the backward pass",
}
_COLUMNS = {"names": "operators", "turns": "turns a step", "waits": "waits a step", "host_ns": "host a step_ns"}
_OF_STACKS = ["doing", "function", "file", "line", "own", "alone", "total", "samples"]
_COLUMNS |= {"gain_ns": "saved without_ns"}

# From which version of torch on get_total_norm is there.
_TOTAL_NORM = (2, 6)


def check(host_parts: Frame = needs(host_parts), waits: Maybe[Frame] = maybe(waits)) -> Estimate:
    loops = host_parts[host_parts["part"] == LOOP]
    if not len(loops):
        return nothing("no operator is called in a loop between the phases of the step")
    gains = gains_of(host_parts, LOOP, waits)
    longest = loops.sort_values("gain_ns", ascending=False).iloc[0]
    turns = _number(longest["turns"])
    if longest["after"] == HOOK:
        loses = f"is lost to {turns} hooks of the backward pass that each read a value"
    else:
        loses = f"is lost to a loop of {turns} turns {_AFTER[longest['after']]}"
    return Estimate(gone_ns=gains, noise_of=HOST, loses=loses)


def explain(
    estimate: Estimate,
    host_parts: Frame = needs(host_parts),
    call_sites: Maybe[list[Call]] = maybe(call_sites),
    hottest: Maybe[Frame] = maybe(hottest),
    job: Job = needs(JOB),
) -> Explanation:
    rank = estimate.worst
    mine = estimate.rows(host_parts[host_parts["part"] == LOOP]).sort_values("gain_ns", ascending=False)
    first = mine.iloc[0]
    reads = " and waits for the device each time" if first["waits"] >= first["turns"] / 2 else ""
    rows = [{str(column): value for column, value in row.items()} for row in mine.to_dict("records")]
    cures = dict.fromkeys(one for row in rows for one in _cures(row, job, rank))
    stacks = hottest.or_none()
    seen = pd.DataFrame(columns=_OF_STACKS) if stacks is None else stacks[stacks["rank"] == rank]
    over = "samples" if _of_samples(rows[0], job) else "parameters"
    behind = ", with its part of the backward pass," if first["in_graph"] else ""
    title = f"A loop over {over} calls small operators one by one"
    return Explanation(
        title="Hooks of the backward pass read values, one by one" if first["after"] == HOOK else title,
        summary=f"{_AFTER[first['after']].capitalize()}, rank {rank} calls {_named(first['names'])} in a loop of"
        f" {_number(first['turns'])} turns{reads}. That takes{behind} {duration(first['host_ns'])} of the host's time,"
        " in which the device has next to nothing to do.",
        changes=tuple(cures),
        evidence=table(f"Loops between the phases of a step, rank {rank}", mine, _COLUMNS),
        where=tuple(place for row in rows for place in places_of(row, job.facts.get(rank, {}), call_sites, seen)),
        sure="Estimated by replaying the traced steps, at the pace of those that were not traced, with a twentieth of"
        " the loop on the host, its kernels in one go, and without its waits.",
    )


def _number(turns: float) -> str:
    return digits(round(turns))


def _named(names: str) -> str:
    return " and ".join(f"`{name.removeprefix('aten::')}`" for name in names.split()[:2])


def _of_samples(loop: dict[str, object], job: Job) -> bool:
    """Return whether a loop is one over the samples of a batch: its results are part of the loss."""
    parameters = settings.optimizer(job).get("parameters")
    return bool(loop["in_graph"]) and round(float(str(loop["turns"]))) != parameters


def _cures(loop: dict[str, object], job: Job, rank: int) -> list[Change]:
    """Return what replaces a loop, by the operators that it calls and where it stands."""
    if _of_samples(loop, job):
        masked = ", and `torch.where` instead of masks as indices, which wait for the device" if loop["waits"] else ""
        return [
            change(
                "compute it for all samples of the batch at once: pad them to the longest (`torch.nn.utils.rnn"
                f".pad_sequence`) and mask what is padding{masked}"
            )
        ]
    if loop["after"] == HOOK:
        return [
            change(
                "look at the gradients every k steps, and let the hooks return at once in the others; or at all of them"
                " together after `backward()` (`torch._foreach_norm`), read with one `.tolist()`"
            )
        ]
    names = {name.removeprefix("aten::").rstrip("_") for name in str(loop["names"]).split()}
    found = []
    if names & {"linalg_vector_norm", "norm", "frobenius_norm"}:
        version = settings.torch_version(job, rank)
        if version is None or version >= _TOTAL_NORM:
            found.append(
                change(
                    "compute one norm for all: `norm = torch.nn.utils.get_total_norm([p.grad for p in"
                    " model.parameters() if p.grad is not None])`, or the one that `clip_grad_norm_` returns"
                )
            )
        else:
            found.append(change("use one norm for all: the one that `torch.nn.utils.clip_grad_norm_` returns"))
    elif names & {"lerp"} or (loop["after"] == "optimizer" and names & {"mul", "add", "copy", "sub"}):
        found.append(
            change(
                "average all parameters at once: `torch.optim.swa_utils.AveragedModel(model,"
                " multi_avg_fn=get_ema_multi_avg_fn(decay))`, or `torch._foreach_lerp_(averages, weights, 1 - decay)`"
                " (timm's `ModelEmaV3` with `foreach=True`)"
            )
        )
    elif names & {"zero"}:
        found.append(change("`optimizer.zero_grad(set_to_none=True)` instead of zeroing each gradient"))
    elif names & {"clamp", "clamp_min", "clamp_max"}:
        found.append(
            change("`torch.nn.utils.clip_grad_value_(parameters, value, foreach=True)`, or `torch._foreach_clamp_*`")
        )
    elif names & {"isnan", "isinf", "isfinite"}:
        found.append(
            change("check all gradients at once: the total norm of the gradients is finite if each of them is")
        )
    elif names & {"add", "mul", "div", "sub", "copy", "abs", "sqrt", "pow"}:
        found.append(
            change("make one call for all tensors: `torch._foreach_add_`, `_foreach_mul_`, `_foreach_copy_`, …")
        )
    if float(str(loop["waits"])) >= float(str(loop["turns"])) / 2:
        found.append(change("keep the result a tensor, and read it (`.item()`) every k steps"))
    return found or [change("make one call for all tensors (`torch._foreach_*`, or stack them first)")]


_SAVES_FROM = (*SAVES_FROM, "computation", "copy")
RULE = Rule("Loops over parameters or samples", check, explain, _SAVES_FROM, only_with="gpu", of_host=True)
