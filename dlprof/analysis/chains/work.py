"""The time of chains of operators in a mean steady step, and the saving with one operator instead of each chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.chains.calls import Calls, calls
from dlprof.analysis.compute.cpu_work import in_all_steps
from dlprof.analysis.compute.kernels import kernels
from dlprof.analysis.engine import Frame, Maybe, by_rank, maybe, needs, within_rank
from dlprof.analysis.timeline.device import LEAST_KERNEL_NS, device_work, has_device
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.analysis.timeline.what_if import LITTLE, WhatIf, what_if
from dlprof.errors import NotMeasured


@dataclass(frozen=True)
class Chain:
    """Places in `Calls`, in order, and the share of their time that a fix leaves.

    `form`: how it is computed; `passes`: "forward" or "backward". `launching`: the share that is left of the host's
    time to launch it; None: the same.
    """

    form: str
    passes: str
    places: NDArray[np.int64]
    left: float
    launching: float | None = None


def chains(calls: Calls, form: str, first: int, last: int, left: tuple[float, float]) -> Iterator[Chain]:
    """Yield the chain from a first place to a last (exclusive), and that of the backward functions it created.

    `left`: the share that a fix leaves of each of the two.
    """
    yield Chain(form, "forward", np.arange(first, last), left[0])
    if len(made := calls.made(first, last)):
        yield Chain(form, "backward", made, left[1])


COLUMNS = ("form", "passes", "calls", "operators", "ns", "left_ns", "gain_ns")


@within_rank
def replaced(
    calls: Calls = needs(calls),
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
    what_if: Maybe[WhatIf] = maybe(what_if),
    kernels: Maybe[Frame] = maybe(kernels),
    device_work: Maybe[Frame] = maybe(device_work),
) -> Callable[[Sequence[Chain]], pd.DataFrame]:
    """Return a function from chains to a frame: their time in a mean steady traced step, the longest first.

    Columns: form, passes, calls (of the chain), operators (in one), ns, left_ns (the time of one operator instead),
    gain_ns (how much shorter the mean steady step would be, the same in each row). On a device gain_ns comes from a
    replay of the traced steps with that share of the kernels and of the host's time to launch them; on a CPU it is
    ns − left_ns. Chains outside the steady steps do not count.
    """

    def made(chains: Sequence[Chain]) -> pd.DataFrame:
        chosen = [chain for chain in chains if calls.took(chain.places) > 0]
        if not chosen:
            return pd.DataFrame({c: pd.Series(dtype="str" if c in COLUMNS[:2] else float) for c in COLUMNS})
        ns = np.array([calls.took(chain.places) for chain in chosen])
        shares = np.array([chain.left for chain in chosen])
        left = np.minimum(np.maximum(ns * shares, LEAST_KERNEL_NS * (has_device & (shares > 0))), ns)
        each = pd.DataFrame([(c.form, c.passes, len(c.places)) for c in chosen], columns=["form", "passes", "size"])
        each = each.assign(ns=ns, left_ns=left)
        n = max(len(timing.windows), 1)
        frame = each.groupby(["form", "passes"], sort=False, as_index=False).agg(
            calls=("ns", "size"), operators=("size", "mean"), ns=("ns", "sum"), left_ns=("left_ns", "sum")
        )
        gain = float((ns - left).sum()) / n
        if has_device:
            gain = _replayed(chosen, left, gain)
        frame = frame.assign(**{c: frame[c] / n for c in ("calls", "ns", "left_ns")}, gain_ns=gain)
        return frame.sort_values("ns", ascending=False, kind="stable", ignore_index=True)[list(COLUMNS)]

    def _replayed(chains: Sequence[Chain], left: NDArray[np.float64], gain: float) -> float:
        try:
            asked = what_if.get()
        except NotMeasured:
            return gain
        launching = _launching(chains, calls)
        most = gain * len(timing.windows) + sum(iv.total(times) * (1 - share) for times, share in launching)
        if most < LITTLE * asked.measured_ns * len(timing.windows):
            return gain
        durations = asked.replay.durations.copy()
        place = pd.Series(np.arange(len(durations)), device_work.get().index.to_numpy()[asked.replay.rows])
        rows = kernels.get().index.to_numpy()
        order = np.argsort(calls.kernel_of, kind="stable")
        launched_by = calls.kernel_of[order]
        for chain, ns in zip(chains, left.tolist(), strict=True):
            bounds = np.searchsorted(launched_by, np.add.outer(chain.places, (0, 1))).tolist()
            launched = np.concatenate([order[first:last] for first, last in bounds])
            mine = np.sort(place.reindex(rows[launched]).dropna().to_numpy(dtype=np.int64))
            few = max(round(chain.left * len(mine)), int(chain.left > 0))
            durations[mine] = -1
            durations[mine[:few]] = max(round(ns / max(few, 1)), 1)
        return asked.gain_ns(durations=durations, other=launching)

    return made


def _launching(chains: Sequence[Chain], calls: Calls) -> list[tuple[iv.Intervals, float]]:
    """Return when the host launched chains, with the share of that time that a fix leaves."""
    by_share: dict[float, list[NDArray[np.int64]]] = {}
    for chain in chains:
        parts = np.split(chain.places, np.flatnonzero(np.diff(chain.places) > 1) + 1)
        by_share.setdefault(chain.left if chain.launching is None else chain.launching, []).extend(parts)
    return [
        (iv.union(*(of[[part[n] for part in parts]] for of, n in ((calls.begin, 0), (calls.end, -1)))), share)
        for share, parts in by_share.items()
    ]


def gains(chains: Frame, cpu_parts: Maybe[Frame], cpu_work: Maybe[Frame], on_cpu: bool) -> dict[int, float]:
    """Return how much shorter each rank's mean steady step would be with its chains fixed, ns.

    `chains`: frames as `replaced` makes them, a rank's one after the other.
    """
    found = by_rank(chains.drop_duplicates("rank"), "gain_ns")
    return in_all_steps(found, cpu_parts.get(), cpu_work.get()) if on_cpu else found
