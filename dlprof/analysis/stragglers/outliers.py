"""Who is late, told without clocks and without all ranks: the rank whose collectives are abnormally short.

Who comes last to a collective finds the others there and stays only for the transfer. So a late rank's collectives are
shorter than everybody else's, whatever its clock says and whichever other ranks were not recorded.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Maybe, across_ranks
from dlprof.errors import NotMeasured

# Dixon's Q, the gap below the shortest over the whole range, exceeds these by chance in one case of twenty: the 95th
# percentiles of 400,000 simulated samples of so many normal values.
_RANKS = (3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 80, 100)
_Q = (0.941, 0.766, 0.641, 0.563, 0.508, 0.467, 0.411, 0.375, 0.330, 0.300, 0.280, 0.255, 0.224, 0.206, 0.195, 0.185)

# Above a hundred ranks: so many standard deviations below the mean.
SIGMAS = 3.0

# Fewer collectives than this elect nobody.
ENOUGH = 3


@across_ranks
def voted(instances: pd.DataFrame, window_steps: Maybe[pd.DataFrame]) -> pd.DataFrame:
    """Count for each rank in how many collectives its own was abnormally short: rank, votes, counted, waited_ns.

    `counted` are the collectives of which three ranks or more are here; waited_ns is by how much a rank's collectives
    last longer than the shortest of the same, ns of a mean traced step. Raises NotMeasured where there are too few.
    """
    frame = instances
    frame = frame[frame["wanted"] > 0]
    frame = frame.assign(dur_ns=frame["end_ns"] - frame["start_ns"])
    here = frame.groupby("instance")["dur_ns"].transform("size")
    frame = frame[here >= _RANKS[0]].sort_values(["instance", "dur_ns"], kind="stable")
    counted = frame["instance"].nunique()
    if counted < ENOUGH:
        raise NotMeasured(f"{counted} collectives of {_RANKS[0]} or more ranks are too few to tell by their lengths")
    groups = frame.groupby("instance")["dur_ns"]
    n = groups.size().to_numpy()
    duration = frame["dur_ns"].to_numpy(dtype=float)
    first = np.concatenate(([0], np.cumsum(n)[:-1]))
    shortest, second, longest = duration[first], duration[first + 1], duration[first + n - 1]
    spread = np.maximum(longest - shortest, 1.0)
    short = (second - shortest) / spread > np.interp(n, _RANKS, _Q)
    far = shortest < groups.mean().to_numpy() - SIGMAS * groups.std(ddof=0).to_numpy()
    elected = frame["rank"].to_numpy()[first][np.where(n > _RANKS[-1], far, short)]
    steps = window_steps.get().groupby("rank").size()
    waited = frame.assign(waited_ns=duration - np.repeat(shortest, n)).groupby("rank")["waited_ns"].sum() / steps
    votes = pd.Series(elected).value_counts().reindex(waited.index).fillna(0).astype(np.int64)
    return pd.DataFrame(
        {"rank": waited.index, "votes": votes.to_numpy(), "counted": counted, "waited_ns": waited.to_numpy()}
    )
