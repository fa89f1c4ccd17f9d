"""One file a raw format: each has `read(path)`, which gives a Reading, and imports no other reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Reading:
    """What one file says about one rank.

    `tables`: names and columns of dlprof/tables.py, checked. `facts`: what stands beside the rows (rank, world_size,
    host, devices, backend, groups, base_time_ns, schema); one that the file does not say is absent. `warnings`: one
    line each, what was lost or is odd.
    """

    tables: Mapping[str, pd.DataFrame]
    facts: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
