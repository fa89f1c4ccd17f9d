"""What of a CPU's step are products, and what other work is split over threads; what they gain by threads or 16 bits.

PyTorch splits a product, and any other operator of more than 32,768 elements (at::internal::GRAIN_SIZE), over its pool
of threads. How much of that a given run gains is not in its trace: memory, caches and the size of each piece decide. So
there are two figures: the most that can be gained, and what is to be expected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct

from dlprof import schema
from dlprof.analysis.compute.operators import operator_work, operators
from dlprof.analysis.compute.products import operands
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, by_rank, maybe, needs, per_rank
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.timeline.device import has_device
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import NotMeasured

_PRODUCT = re.compile(
    r"aten::(_?addmm\w*|mm|bmm|baddbmm|addbmm|addmv|mv|dot|\w*conv\w*|mkldnn_\w+|\w*attention\w*|\w*lstm\w*|\w*gru\w*)$"
)

# Operators that PyTorch's CPU kernels run on one thread, whatever their size.
_SERIAL = re.compile(
    r"aten::(bernoulli|normal|uniform|random|rand\w*|exponential|multinomial|sort|argsort|unique\w*|nonzero|cumsum|item"
    r"|_local_scalar_dense|embedding_dense_backward|index_add|scatter_add|empty\w*|to|_to_copy)_?$"
)

# On one core 32,768 elements take from 5 (adding in a cache) to 25 µs: an operator that takes longer has more of them.
_SPLIT_NS = 25_000

# To start a pool's threads and wait for them takes a few µs each time.
_FORK_NS = 5_000

# What is to be expected of r times as many threads, as powers of r: of products, and of what memory feeds, which a few
# cores use up. Measured: a small transformer's step of 133 ms on one core takes 80 ms on two, with these 83.
_PRODUCTS, _OTHERS, _MOST_OTHERS = 0.9, 0.7, 4.0

# By unit, the best first: how many times as fast products and convolutions are under autocast in bfloat16 as in
# float32, forward and backward, with what it takes to convert operands and results. AMX: PyTorch on Xeon of the fourth
# generation trains ResNet-50 1.9 to 3 and BERT-large 2.1 to 3.3 times as fast as in float32 (Intel and PyTorch, 2023).
# AVX-512's and Arm's units have twice the products of float32 an instruction: measured on an AMD EPYC 9004 with one
# thread, layers of 512 to 4,096 features and 3x3 convolutions are 1.2 to 2.6 times as fast.
TIMES: Mapping[str, float] = {"amx_bf16": 2.5, "avx512_bf16": 1.7, "svebf16": 1.7, "bf16": 1.7}

# What autocast costs a product, forward or backward, however small: operators that convert its operands and results.
# Measured on the same CPU: eight layers of 32 features take 290 µs a step, and 852 µs under autocast, for 24 products.
_CONVERT_NS = 23_000

# How many times as long a product with a vector takes under autocast: nothing is used twice, and its operands are
# converted first. Measured on that CPU with one thread, forward and backward: seven of eight shapes of up to 4,096
# features take 1.9 to 3.7 times as long, one 1.1 times. With two columns already all are faster.
_VECTOR_TIMES = 2.0

# These only call the operator that convolves, which is a product of its own.
_CALLS_PRODUCT = re.compile(r"aten::(conv\dd|_?convolution|convolution_backward)$")

UNITS: Mapping[str, str] = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    "svebf16": "SVE's bfloat16",
    "bf16": "Arm's bfloat16",
}


@per_rank
def cpu_work(
    operator_work: Frame = needs(operator_work),
    spans: Frame = needs(schema.SPANS),
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
) -> pd.DataFrame:
    """Return one row of what operators on a CPU take of a mean traced step, each in no other.

    Columns: operators_ns (of all), products_ns and products (their calls), inner (those that call no other product),
    split_ns and split (of others with elements enough for several threads). Raises NotMeasured where a device computes,
    or no operator was traced.
    """
    if has_device:
        raise NotMeasured("a device computes, and not the CPU")
    names, took = [str(name) for name in spans["name"].cat.categories], operator_work["dur_ns"].to_numpy()
    codes = spans["name"].cat.codes.to_numpy()[operator_work.index]
    kind = np.array([_kind(name) for name in names])[codes]
    calls_product = np.array([_CALLS_PRODUCT.match(name) is not None for name in names], dtype=bool)[codes]
    product, split = kind == "product", (kind == "other") & (took >= _SPLIT_NS)
    sums = {
        "operators_ns": took.sum(),
        "products_ns": took[product].sum(),
        "products": product.sum(),
        "inner": (product & ~calls_product).sum(),
        "split_ns": took[split].sum(),
        "split": split.sum(),
    }
    return pd.DataFrame([sums]) / len(timing.windows)


def is_product(name: str) -> bool:
    """Return whether an operator multiplies matrices, or convolves."""
    return _PRODUCT.match(name) is not None


def _kind(name: str) -> str:
    return "product" if is_product(name) else "serial" if _SERIAL.match(name) else "other"


@across_ranks
def cpu_parts(cpu_work: Frame = needs(cpu_work), breakdown: Maybe[Frame] = maybe(breakdown)) -> pd.DataFrame:
    """Return the same of the mean steady step, a row a rank: its computation is divided as that of the traced steps."""
    computing = part(breakdown.get(), "computation")
    factor = cpu_work["rank"].map(computing).fillna(0.0) / cpu_work["operators_ns"].replace(0.0, np.nan)
    times = [name for name in cpu_work.columns if name.endswith("_ns")]
    return cpu_work.assign(**{name: cpu_work[name] * factor.fillna(0.0) for name in times})


def in_all_steps(found: Mapping[int, float], cpu_parts: pd.DataFrame, cpu_work: pd.DataFrame) -> dict[int, float]:
    """Return what operators take of the mean steady step, rank → ns, by what they take of traced ones.

    The profiler makes those longer.
    """
    whole, traced = by_rank(cpu_parts, "operators_ns"), by_rank(cpu_work, "operators_ns")
    return {rank: ns * whole.get(rank, 0.0) / max(traced.get(rank, 0.0), 1.0) for rank, ns in found.items()}


def split_share(parts: pd.DataFrame | None, mean_step_ns: float) -> dict[int, float]:
    """Return which share of each rank's step are operators that are split over threads; {}: not known."""
    if parts is None or not mean_step_ns:
        return {}
    split = by_rank(parts.assign(ns=parts["products_ns"] + parts["split_ns"]), "ns")
    return {rank: min(ns / mean_step_ns, 1.0) for rank, ns in split.items()}


class Gain(Struct, frozen=True):
    """What more threads take off a rank's step, ns: as is to be expected, and at most."""

    expected_ns: float
    most_ns: float


def by_threads(parts: pd.DataFrame, rank: int, times: float) -> Gain:
    """Return what so many times as many threads take off the step of a rank in `cpu_parts`, each with a core."""
    row = {name: by_rank(parts, name).get(rank, 0.0) for name in ("products_ns", "products", "split_ns", "split")}
    most = (row["products_ns"] + row["split_ns"]) * (1 - 1 / times)
    expected = 0.0
    for kind, power, scale in (("products", _PRODUCTS, times), ("split", _OTHERS, min(times, _MOST_OTHERS))):
        ns = row[f"{kind}_ns"]
        expected += max(ns - ns / scale**power - row[kind] * _FORK_NS, 0.0)
    return Gain(min(expected, most), most)


@across_ranks
def cpu_float32(
    cpu_parts: Frame = needs(cpu_parts), operators: Maybe[Frame] = maybe(operators), job: Job = needs(JOB)
) -> pd.DataFrame:
    """Return what ranks on a CPU multiply in float32, and would save in bfloat16, ns of the mean steady step.

    Columns: rank, unit ("": there is none for bfloat16), float32_ns, fp32_saved_ns. A rank whose model is called under
    autocast, or has no parameters in float32, has none. Raises NotMeasured where no rank's units were recorded.
    """
    units = {
        rank: found for rank in job.ranks if (found := (job.facts[rank].get("cpu") or {}).get("units")) is not None
    }
    frame = cpu_parts[cpu_parts["rank"].isin(list(units))]
    if frame.empty:
        raise NotMeasured("whether this CPU has units for 16-bit products is not recorded")
    rows = []
    products = frame[["rank", "products_ns", "inner"]].itertuples(index=False, name=None)
    for rank, ns, inner in products:
        unit = next((unit for unit in TIMES if unit in units[rank]), "")
        float32 = ns if in_float32(job.facts[rank]) else 0.0
        vectors = float32 * _vector_share(operators.or_none(), rank) if unit else 0.0
        gained = (float32 - vectors) * (1 - 1 / TIMES[unit]) if unit else 0.0
        saved = gained - vectors * (_VECTOR_TIMES - 1) - inner * _CONVERT_NS
        rows.append((rank, unit, float32, max(saved, 0.0)))
    return pd.DataFrame(rows, columns=["rank", "unit", "float32_ns", "fp32_saved_ns"])


def _vector_share(operators: pd.DataFrame | None, rank: int) -> float:
    """Return which share of a rank's products is with a vector, as far as shapes are known."""
    if operators is None:
        return 0.0
    mine = operators[operators["operator"].map(is_product).astype(bool) & (operators["rank"] == rank)]
    vectors = [
        name in ("aten::mv", "aten::addmv", "aten::dot")
        or (name.endswith("mm") and any(1 in tensor[-2:] for tensor in operands(name, shape)))
        for name, shape in zip(mine["operator"], mine["shape"], strict=True)
    ]
    return float(mine.loc[vectors, "ns"].sum()) / max(float(mine["ns"].sum()), 1.0)


def in_float32(facts: Mapping[str, Any]) -> bool:
    """Return whether a rank multiplies in float32, by its recorded facts: no autocast, and parameters of that type."""
    autocast = facts.get("autocast") or {}
    kinds = {str(kind) for model in facts.get("models") or [] for kind in model.get("dtypes") or ()}
    rounded = (facts.get("matmul") or {}).get("cpu_matmul_fp32_precision") == "bf16"
    return not autocast.get("enabled") and not rounded and (not kinds or "float32" in kinds)
