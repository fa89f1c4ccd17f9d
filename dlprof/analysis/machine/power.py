"""What a lower power limit would cost: the GPU's clock falls until its power fits, and what computes takes longer.

A GPU that reaches its limit lowers the clock of its multiprocessors, but not that of its memory. Its power follows
P ~ f^k. Switching takes c·f·V² watts, and the voltage V falls with the clock, so k is at most 3, and near 1 where V is
at its minimum. Leakage and memory take the same power at any clock. k is fitted where the clock of this run varied
without reaching the power limit, as with heat; otherwise it is assumed to be in K_RANGE.

Matrix products and convolutions slow down as the clock does. Copies, collectives and idle time do not change. Other
kernels mostly wait for memory: between none and all of their time slows down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.operators import tensor_cores
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs, per_rank
from dlprof.analysis.machine.clocks import REASONS
from dlprof.analysis.machine.log_clocks import placed_samples
from dlprof.analysis.machine.samples import ENOUGH, steady_span
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result.throughput import PowerLimit

# The exponent k where the run does not show it; the range goes from mostly leakage and memory power to none.
K, K_RANGE = 2.2, (1.5, 3.0)

# Clocks that vary by less than this share show nothing. A fitted k outside this range is not a property of a GPU.
_LEAST_SPREAD = 0.05
_SENSIBLE = (1.0, 4.0)

# Of the limit that is set now.
SHARES = (1.0, 0.9, 0.8, 0.7)

# An idle GPU draws about this share of its limit (A100 and H100: 50 to 70 W).
_IDLE = 0.1

_METRICS = ("power_w", "power_limit_w", "sm_clock_mhz", "clock_reasons_bits")


@per_rank
def power_draw(
    placed_samples: Frame = needs(placed_samples), steady_span: tuple[int, int] = needs(steady_span)
) -> pd.DataFrame:
    """Return one row for the rank's GPU in steady steps: power_w, limit_w, k and k_noise (NaN: not fitted), readings.

    Raises NotMeasured where power or its limit were not read.
    """
    chosen = placed_samples["at_ns"].between(*steady_span) & (placed_samples["source"] == "gpu").to_numpy()
    mine = placed_samples[chosen & placed_samples["metric"].isin(_METRICS).to_numpy()]
    read = mine.pivot_table(index="at_ns", columns="metric", values="value", observed=True)
    read = read.reindex(columns=list(_METRICS))
    read = read[(read["power_w"] > 0) & (read["power_limit_w"] > 0)]
    if len(read) < ENOUGH:
        raise NotMeasured("the GPU's power and its limit were not read often enough during training")
    k, noise = _fitted(read)
    row = {"power_w": read["power_w"].mean(), "limit_w": read["power_limit_w"].mean(), "k": k, "k_noise": noise}
    return pd.DataFrame([row | {"readings": len(read)}])


def _fitted(read: pd.DataFrame) -> tuple[float, float]:
    """Return k of P ~ f^k and its standard error, by least squares of the logarithms; NaN where clocks show nothing."""
    bits = read["clock_reasons_bits"].fillna(REASONS["power_cap"]).astype(np.int64)  # unknown: perhaps at the limit
    free = read[(bits & REASONS["power_cap"] == 0) & (read["sm_clock_mhz"] > 0)]
    if len(free) < 2 * ENOUGH:
        return math.nan, math.nan
    f, p = (np.log(free[c].to_numpy(dtype=float)) for c in ("sm_clock_mhz", "power_w"))
    apart = f - f.mean()
    square = float(apart @ apart)
    if np.ptp(np.quantile(f, (0.05, 0.95))) < _LEAST_SPREAD:
        return math.nan, math.nan
    k = float(apart @ p) / square
    rest = p - p.mean() - k * apart
    return k, math.sqrt(float(rest @ rest) / (len(f) - 2) / square)


@dataclass(frozen=True)
class PowerModel:
    """What a job's step would be at another power limit.

    ranks: rank, power_w, limit_w, own_ns, products_ns, computed_ns (of the mean step), busy (share of the step in which
    its device works). k: its least, likely and largest value; fitted: whether this run shows it.
    """

    ranks: pd.DataFrame
    step_ns: float
    k: tuple[float, float, float]
    fitted: bool

    def at(self, share: float) -> PowerLimit:
        """Return the step at a share of each GPU's present limit."""
        r = self.ranks
        least, likely, most = self.k
        limit = share * r["limit_w"]
        # The limit applies to the power while a GPU works, which is more than its mean.
        working = (r["power_w"] - _IDLE * r["limit_w"] * (1 - r["busy"])) / r["busy"].clip(lower=0.05)
        working = working.clip(lower=r["power_w"])
        both = (r["products_ns"] + r["computed_ns"]) / 2
        return PowerLimit(
            share=share,
            limit_w=float(limit.mean()),
            step_ns=self._step(working, limit, likely, (r["products_ns"] + both) / 2),
            least_ns=self._step(r["power_w"], limit, most, r["products_ns"]),
            most_ns=self._step(working, limit, least, r["computed_ns"]),
            power_w=float(np.minimum(r["power_w"], limit).sum()),
        )

    def _step(self, power: pd.Series[float], limit: pd.Series[float], k: float, scales: pd.Series[float]) -> float:
        """Return the mean step where the part `scales` of each rank's step slows down as its clock does."""
        own = self.ranks["own_ns"]
        now = np.minimum(power, self.ranks["limit_w"])  # no GPU draws more than its limit
        slower = np.maximum(now / limit, 1.0) ** (1 / k)
        return self.step_ns + float((own + scales * (slower - 1)).max() - own.max())


@across_ranks
def power_model(
    power_draw: Frame = needs(power_draw),
    breakdown: Frame = needs(breakdown),
    tensor_cores: Maybe[Frame] = maybe(tensor_cores),
    own_time: Frame = needs(own_time),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> PowerModel:
    """Return the model; raise NotMeasured where no trace shows what computes, or a rank's power is not known."""
    if not settings.on_gpu(job):
        raise DoesNotApply("the job does not train on a GPU")
    if len(missing := set(job.ranks) - set(power_draw["rank"])):
        raise NotMeasured(f"the power of {len(missing)} of {len(job.ranks)} ranks' GPUs is not known")
    computed = pd.Series(part(breakdown, "computation"))
    busy = pd.Series(part(breakdown, "computation", "communication", "copy")) / mean_step_ns
    ranks = power_draw.set_index("rank").assign(
        own_ns=own_time.set_index("rank")["own_ns"],
        computed_ns=computed,
        products_ns=computed * _products(tensor_cores, computed.index),
        busy=busy.clip(upper=1.0),
    )
    if not computed.any() or ranks[["own_ns", "computed_ns"]].isna().any(axis=None):
        raise NotMeasured("no trace shows how much of the step is computation")
    known = power_draw[power_draw["k"].notna()]
    fitted = len(known) > 0 and bool(known["k"].between(*_SENSIBLE).all())
    k = (K_RANGE[0], K, K_RANGE[1])
    if fitted:
        likely, noise = float(known["k"].mean()), max(float(known["k_noise"].max()), 0.1)
        k = (max(likely - 2 * noise, _SENSIBLE[0]), likely, min(likely + 2 * noise, _SENSIBLE[1]))
    return PowerModel(ranks.reset_index(), mean_step_ns, k, fitted)


def _products(tensor_cores: Maybe[pd.DataFrame], ranks: pd.Index) -> pd.Series[float]:
    """Return what share of each rank's kernels are products, as far as their names show; 0 where none is known."""
    frame = tensor_cores.or_none()
    if frame is None:
        return pd.Series(0.0, index=ranks)
    products = frame[["tensor_ns", "float32_ns", "unknown_ns"]].sum(axis=1) / frame["kernel_ns"].clip(lower=1.0)
    share: pd.Series[float] = products.set_axis(frame["rank"]).reindex(ranks).fillna(0.0)
    return share


@across_ranks
def power_limits(power_model: PowerModel = needs(power_model)) -> tuple[PowerLimit, ...]:
    """Return what the step would be at each of SHARES of the power limit."""
    return tuple(power_model.at(share) for share in SHARES)
