"""Matrix products and convolutions run in float64, which is rarely meant.

NumPy's default type, `.double()`, or a float64 tensor that promotes what it meets: everything after it is in float64. A
CPU's vector units hold half as many such numbers. GPUs for games and graphics multiply them at a 64th of float32's
rate; those for data centers at half of it, or on tensor cores as fast; all move twice the bytes.

Needs a trace, and the types of what is multiplied: of the step whose FLOPs are counted, or traced (`--shapes`,
record_shapes=True). On a GPU also its peaks.

Saving: each such product by the ratio of what its FLOPs at the device's peaks, or its bytes if these take longer, take
in the two types; where the peak in float64 is not known, as long as at half of float32's; in TF32, where that is
allowed, at half of its peak. Where all products are in float64, PyTorch's other kernels in it take half as long: they
move half of the bytes. No sooner than the host launches. On a CPU half of the products, four fifths of the
convolutions, for which oneDNN has no float64, and, where all of these are in float64, half of the other operators on
large tensors.

What to change: make the inputs in float32 (`torch.from_numpy(x).float()`, `dtype=np.float32`), and the model
(`model.float()`, no `torch.set_default_dtype(torch.float64)`). Where a part needs float64, cast around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis import settings
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work, in_all_steps, is_product
from dlprof.analysis.compute.kernels import kernels, named, shorter_kernels
from dlprof.analysis.compute.operators import operators
from dlprof.analysis.compute.peaks import device_peaks, peak_of, precision_of
from dlprof.analysis.compute.products import TENSOR_SHARE
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, by_rank, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing, worst
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import busiest, call_sites
from dlprof.analysis.source.patches import Call
from dlprof.analysis.source.statements import float64_lines
from dlprof.analysis.timeline.device import LEAST_KERNEL_NS
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.result import Place
from dlprof.units import duration, percent

# What float32 leaves on a CPU. Measured on an AMD EPYC with one thread: of products of 32 to 1,024 rows 0.36 to 0.59,
# of convolutions 0.21 to 0.49 alone and 0.13 in a network, of norms, losses and activations 0.28 to 0.53.
_LEFT, _CONVOLUTION_LEFT = 0.5, 0.2

_COLUMNS = {"operator": "operator", "shape": "shapes", "calls": "times a step", "ns": "in float64_ns"}


@per_rank
def float64_products(
    operators: Frame = needs(operators),
    spans: Frame = needs(schema.SPANS),
    kernels: Maybe[Frame] = maybe(kernels),
    shorter_kernels: Maybe[Callable[..., float]] = maybe(shorter_kernels),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return one row, ns of a mean traced step: products_ns, typed_ns (of known types), float64_ns, saved_ns (NaN: of
    unknown peaks), and on_device (the trace holds a device's work).
    """
    mine, work = operators[operators["operator"].map(is_product)], kernels.or_none()
    ns, double = mine["ns"], mine["dtype"] == "float64"
    left = mine["operator"].map(_on_cpu).astype(float) if work is None else _on_device(mine, rank)
    gone = (ns * (1 - left)).where(double, 0.0)
    saved = float(gone.sum(skipna=False))
    if work is None and double.any() and double[mine["dtype"] != ""].all():
        saved += float(cpu_work.get()["split_ns"].sum()) * (1 - _LEFT)
    elif work is not None and double.any() and not math.isnan(saved):
        share = 1 - gone.groupby(mine["operator"]).sum() / ns.groupby(mine["operator"]).sum()
        names, owner = spans["name"].cat, work["owner"].to_numpy()
        of_name = share.reindex(names.categories).fillna(1.0).to_numpy()
        of_kernel = np.where(owner < 0, 1.0, of_name[names.codes.to_numpy()[owner]])
        if double[mine["dtype"] != ""].all():  # all that is computed is in it: others move half of the bytes
            halves = (of_kernel == 1) & (work["unit"] == "").to_numpy() & named(work, _in_float64)
            of_kernel[halves & (work["dur_ns"] > 2 * LEAST_KERNEL_NS).to_numpy()] = _LEFT
        saved = shorter_kernels.get()(of_kernel < 1, of_kernel)
    sums = {"products_ns": ns.sum(), "typed_ns": ns[mine["dtype"] != ""].sum(), "float64_ns": ns[double].sum()}
    return pd.DataFrame([sums | {"saved_ns": saved, "on_device": work is not None}])


def _in_float64(kernel: str) -> bool:
    """Return whether PyTorch's own kernel computes in float64, as its C++ name shows."""
    return "at::native" in kernel and "double" in kernel


def _on_cpu(product: str) -> float:
    return _CONVOLUTION_LEFT if "conv" in product else _LEFT


def _on_device(products: pd.DataFrame, rank: RankFacts) -> pd.Series[float]:
    """Return the share of each product's time that float32 leaves; NaN: not known."""
    _, peaks, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    matmul, names = rank.facts.get("matmul") or {}, products["operator"]
    cut = np.array([precision_of(name, "float32", matmul) == "tf32" for name in names], dtype=bool)
    single = np.array([peak_of(name, "float32", matmul, peaks) for name in names], dtype=float)
    single *= np.where(cut, TENSOR_SHARE, 1.0)
    flops, moved = products["flops"].to_numpy(), products["bytes"].to_numpy() / (bandwidth or math.nan)
    rate_64, took = peaks.get("float64", math.nan), products["ns"].to_numpy() / 1e9
    now, alike = took * TENSOR_SHARE, np.ones(len(took))
    if rate_64 > 0:
        now = np.fmax(flops / rate_64, moved)
        # TF32 reaches half of its peak, whatever float64 reaches of its own; less where float64 reaches less, too.
        alike = np.where(cut, np.clip(now / took, TENSOR_SHARE, 1.0), 1.0)
    left = np.where(np.isnan(flops), rate_64 / single, np.fmax(flops / single * alike, moved / 2) / now)
    return pd.Series(np.where(single > 0, left, np.nan), products.index).clip(upper=1.0)


def check(
    float64_products: Frame = needs(float64_products),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Estimate:
    took, saved = by_rank(float64_products, "float64_ns"), by_rank(float64_products, "saved_ns")
    if not settings.on_cpu(job) and not float64_products["on_device"].all():
        raise NotMeasured("the trace holds no work of a device")
    if float64_products["products_ns"].any() and not float64_products["typed_ns"].any():
        raise NotMeasured("the types of its products were neither traced (`--shapes`, record_shapes=True) nor counted")
    if not any(took.values()):
        return nothing("no product is in float64")
    if settings.on_cpu(job):
        took, saved = (in_all_steps(of, cpu_parts.get(), cpu_work.get()) for of in (took, saved))
    rank, known = worst(took), bool(float64_products["saved_ns"].notna().all())
    name = device_peaks(job.facts[rank], job.trace_facts[rank])[0] or "this device"
    return Estimate(
        gone_ns=saved if known else took,
        noise_of=("computation",),
        loses="would be saved by computing in float32",
        summary=f"products in float64 take {percent(took[rank] / mean_step_ns)} of the step",
        unknown="" if known else f"what float32 would save is not known: the peaks of {name} are missing",
        seen=took,
    )


def explain(
    estimate: Estimate,
    operators: Frame = needs(operators),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
    call_sites: Maybe[list[Call]] = maybe(call_sites),
    float64_lines: list[Place] = needs(float64_lines),
) -> Explanation:
    rank, mine = estimate.worst, estimate.rows(operators)
    mine = mine[mine["operator"].map(is_product) & (mine["dtype"] == "float64")].replace("", np.nan)
    names = mine["operator"].unique().tolist()
    most = f"`{'`, `'.join(name.removeprefix('aten::') for name in names[:3])}`"
    return Explanation(
        title="Products run in float64",
        summary=f"{most} in float64 take {duration(estimate.seen[rank])} of a step of {duration(mean_step_ns)} on rank"
        f" {rank}, which would be {duration(estimate.by_rank_ns[rank])} shorter in float32.",
        changes=(
            change(
                f"`.float()` on the inputs of {most} where they are made (NumPy's default is float64), `model.float()`",
                numerics=True,
                dtype=("float64", "float32"),
            ),
        ),
        evidence=table(f"Products in float64, a step of rank {rank}", mine, _COLUMNS, 12),
        sure="Estimated by what other products gained on a CPU."
        if settings.on_cpu(job)
        else "Estimated by the device's peaks, no sooner than the host launches.",
        where=(
            *_made(job.facts[rank], call_sites.or_none() or (), float64_lines),
            *busiest(job.facts[rank], "forward", "forward", names),
        ),
    )


def _made(facts: Mapping[str, Any], calls: Iterable[Call], lines: Sequence[Place]) -> tuple[Place, ...]:
    """Return where float64 comes in, and where a model is made whose parameters are in it."""
    made = [one for one in calls if one.kind == "model"]
    if not any("float64" in (one.get("dtypes") or {}) for one in facts.get("models") or ()):
        made = []
    return (*lines, *(Place(one.file, one.line, one.function, what=one.source) for one in made[:1]))


RULE = Rule("Products in float64", check, explain, saves_from=("computation",))
