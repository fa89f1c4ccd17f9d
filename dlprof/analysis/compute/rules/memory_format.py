"""Convolutions run in the contiguous memory format (NCHW), where channels_last (NHWC) is faster.

Tensor cores convolve in NHWC: for tensors in NCHW cuDNN launches kernels that convert them (`nchwToNhwc`,
`nhwcToNchw`). PyTorch's own batch norm, which bfloat16 uses, is slower in NCHW. On a CPU, oneDNN reorders the tensors
of each convolution, and PyTorch's batch norm and max pooling compute several channels at once in NHWC only.

Needs a trace, and the shapes of the convolutions: of the step whose FLOPs are counted, or traced (`--shapes`,
record_shapes=True). Left alone are models in channels_last, and those that would be no faster: with group or instance
norms, with grouped convolutions (depthwise ones may be), or without tensor cores. AMD's GPUs are not judged.

Saving: the conversions, and PyTorch's batch norm less what its kernels for NHWC take, by the elements that they read
and write and what they reached on a V100 and an A100. The traced steps are replayed: no sooner than the host launches.
cuDNN's batch norm, pooling and the convolutions themselves count as equally fast. On a CPU: what five networks gained.

What to change: `.to(memory_format=torch.channels_last)` of the model before the optimizer is made, and of each batch of
images; `torch.channels_last_3d` for volumes. `--set model.memory_format=channels_last` tries both.
"""

from __future__ import annotations

import ast
import math

from dlprof.analysis import settings
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work, in_all_steps
from dlprof.analysis.compute.layouts import nchw
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.source import insertions
from dlprof.analysis.source.edits import Call
from dlprof.analysis.source.line_shares import call_sites
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.result import Change
from dlprof.units import duration, percent

# The standard error: a tenth of what batch norm is predicted to take in NHWC, twice the scatter over shapes; on a CPU
# half of what convolutions are expected to gain, for they gained from nothing to twice that.
_NORM_NOISE, _CPU_NOISE = 0.1, 0.5

_COLUMNS = {"norm_ns": "norms in NCHW_ns", "left_ns": "in channels_last_ns", "convert_ns": "conversion_ns"}


def check(
    nchw: Frame = needs(nchw),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Estimate:
    if settings.model(job).get("channels_last"):
        return nothing("the model is in channels_last")
    on_cpu, saved = settings.on_cpu(job), by_rank(nchw, "saved_ns")
    share = (nchw["convert_ns"] + nchw["norm_ns"]).max() / mean_step_ns
    summary = f"what the contiguous memory format makes slower takes {percent(share)} of the step"
    if against := next(filter(None, nchw["against"]), ""):
        return nothing(f"{summary}, but {against}")
    if share < LEAST_SHARE:
        return nothing(summary)
    if not nchw["dimensions"].any():
        raise NotMeasured("the convolutions' shapes were neither traced (`--shapes`, record_shapes=True) nor counted")
    noise = _CPU_NOISE * nchw["convert_ns"] if on_cpu else _NORM_NOISE * nchw["left_ns"]
    return Estimate(
        gone_ns=in_all_steps(saved, cpu_parts.get(), cpu_work.get()) if on_cpu else saved,
        noise_ns=float(noise.fillna(0.0).max()),
        loses="would be saved by convolutions in channels_last",
        summary=summary,
    )


def explain(
    estimate: Estimate,
    nchw: Frame = needs(nchw),
    call_sites: list[Call] = needs(call_sites),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Explanation:
    mine, on_cpu = estimate.rows(nchw), settings.on_cpu(job)
    row = mine.iloc[0]
    norm = "batch norm and max pooling take" if on_cpu else "batch norm takes"
    converting = "reordering the operands of convolutions" if on_cpu else "conversion to NHWC and back"
    left = "" if math.isnan(row["left_ns"]) else f" (in channels_last {duration(row['left_ns'])})"
    return Explanation(
        title="Convolutions run in the contiguous memory format, and not in channels_last",
        summary=f"Of a step of {duration(mean_step_ns)} on rank {estimate.worst}, {norm}"
        f" {duration(row['norm_ns'])}{left}, and {converting} {duration(row['convert_ns'])}.",
        changes=(_change(call_sites, "channels_last" if row["dimensions"] == 4 else "channels_last_3d"),),
        evidence=table(f"What the memory format costs a traced step of rank {estimate.worst}", mine, _COLUMNS),
        sure="Estimated by what other networks gained on another CPU: `dlprof try` measures it."
        if on_cpu
        else "Predicted by the elements that batch norm's kernels for NHWC read and write; pooling and the convolutions"
        f" count as equally fast.{'' if left else ' What batch norm gains is not known.'}",
    )


def _change(calls: list[Call], name: str) -> Change:
    """Return the change, of the model and of its inputs, at the script's own lines where these are known for sure.

    Both are appended to an expression, which no name's scope or value can break.
    """
    to = f"`.to(memory_format=torch.{name})`"
    forward = next((call for call in calls if call.kind == "forward"), None)
    run = insertions.call_of(forward) if forward and forward.takes else None  # the line calls the model itself
    model = next(map(_model, insertions.models(calls, insertions.last_name(run.func) if run else "")), "")
    given = insertions.target(forward, run) if forward and run and insertions.format_of(forward) == name else None
    images = (
        f"`{ast.unparse(given)}` in `{ast.unparse(run)}` at {forward.file}:{forward.line}"
        if given and run and forward
        else ""
    )
    called = f" (the model is called at {forward.file}:{forward.line})" if forward and forward.takes else ""
    made = next((f" at {call.file}:{call.line}" for call in calls if call.kind == "optimizer" and not call.via), "")
    if model:
        text = f"append {to} to {model}, and to {images or f'each batch of images{called}'}"
    else:
        of_images = f"append it to {images}" if images else f"of each batch of images{called}"
        text = f"{to} of the model, before the optimizer is made{made}, and {of_images}"
    return change(text, memory_format=("contiguous_format", "channels_last"))


def _model(call: Call) -> str:
    """Return where the whole model stands, in words."""
    node = insertions.call_of(call)
    whole = None if node is None else insertions.target(call, node)
    if node is None or whole is None:
        return ""
    inside = "" if whole is node else f" in `{ast.unparse(node.func)}({ast.unparse(whole)}.parameters(), …)`"
    return f"`{ast.unparse(whole)}`{inside} at {call.file}:{call.line}"


RULE = Rule("Memory format of convolutions", check, explain, saves_from=("computation", "launch_latency"))
