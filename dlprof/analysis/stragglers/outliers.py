"""Which rank is late, without clocks and without all ranks: the one whose collectives are abnormally short.

Who comes last to a collective finds the others there and stays only for the transfer. So a late rank's collectives are
shorter than everybody else's, whatever its clock says and whichever other ranks were not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from dlprof.analysis.communication.collectives import window_steps
from dlprof.analysis.communication.matching import instances
from dlprof.analysis.engine import Frame, Maybe, across_ranks, maybe, needs
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.errors import NotMeasured

# Dixon's Q, the gap below the shortest over the whole range, exceeds these by chance in one case of twenty: the 95th
# percentiles of 400,000 simulated samples of so many normal values.
_RANKS = (3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 80, 100)
_Q = (0.941, 0.766, 0.641, 0.563, 0.508, 0.467, 0.411, 0.375, 0.330, 0.300, 0.280, 0.255, 0.224, 0.206, 0.195, 0.185)

# Above a hundred ranks: so many standard deviations below the mean.
SIGMAS = 3.0

# Fewer collectives than this show nothing.
ENOUGH = 3


@across_ranks
def short_collectives(
    instances: Frame = needs(instances), window_steps: Maybe[Frame] = maybe(window_steps)
) -> pd.DataFrame:
    """Count for each rank in how many collectives its own was abnormally short: rank, short, counted, waited_ns.

    `counted` are the collectives of which three ranks or more are here; waited_ns is by how much a rank's collectives
    last longer than the shortest of the same, ns of a mean traced step. Raises NotMeasured where there are too few.
    """
    frame = instances[instances["wanted"] > 0]
    frame = frame.assign(dur_ns=frame["end_ns"] - frame["start_ns"])
    here = frame.groupby("instance")["dur_ns"].transform("size")
    frame = frame[here >= _RANKS[0]].sort_values(["instance", "dur_ns"], kind="stable")
    counted = frame["instance"].nunique()
    if counted < ENOUGH:
        raise NotMeasured(f"{counted} collectives of {_RANKS[0]} or more ranks are too few to tell by their lengths")
    groups = frame.groupby("instance")["dur_ns"]
    n, shortest, longest = groups.size(), groups.min(), groups.max()
    apart = (groups.nth(1).to_numpy() - shortest) / (longest - shortest).clip(lower=1.0) > np.interp(n, _RANKS, _Q)
    far = shortest < groups.mean() - SIGMAS * groups.std(ddof=0)
    first = frame.groupby("instance")["rank"].first()
    outliers = first[far.where(n > _RANKS[-1], apart)]
    steps = window_steps.get().groupby("rank").size()
    waited = (frame["dur_ns"] - groups.transform("min")).groupby(frame["rank"]).sum() / steps
    short = outliers.value_counts().reindex(waited.index, fill_value=0)
    return pd.DataFrame({"short": short, "counted": counted, "waited_ns": waited}).reset_index()


@dataclass(frozen=True)
class Outlier:
    """The rank that most collectives were abnormally short on, and what the others wait for it, ns a step."""

    rank: int
    table: pd.DataFrame  # as `short_collectives`
    mean_ns: float  # that the others stay longer in their collectives
    gain_ns: float  # of it, what is gone without this rank: they would still wait for the next


@across_ranks
def outlier(short_collectives: Frame = needs(short_collectives), breakdown: Frame = needs(breakdown)) -> Outlier:
    """Return the late rank; raise NotMeasured where no rank has the majority of the collectives."""
    short = short_collectives.set_index("rank")
    late = int(str(short["short"].idxmax()))
    if 2 * short["short"].max() <= short["counted"].iloc[0]:
        raise NotMeasured("the collectives of those that are here last alike: if one is late, its trace is not here")
    # What is hidden behind computation costs nothing, and is no waiting.
    exposed_ns = pd.Series(part(breakdown, "communication"), dtype=float).reindex(short.index).fillna(0.0)
    waited = short["waited_ns"].clip(upper=exposed_ns).drop(index=late)
    return Outlier(late, short_collectives, float(waited.mean()), float(waited.min()))
