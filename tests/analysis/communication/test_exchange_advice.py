"""What to change, by what the ranks exchange and what wraps the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.communication.exchange_plans import exchange_plans, fewer_collectives
from dlprof.result import Setting
from tests.fixtures import runs, traces


def small(*kinds: str) -> pd.DataFrame:
    """Make a frame of small collectives, 20 a step of each kind."""
    return pd.DataFrame({"collective": kinds, "calls": [20.0] * len(kinds)})


@pytest.mark.parametrize(
    ("model", "kind", "settings"),
    [
        ({"ddp": {"bucket_cap_mb": 1}}, "all_reduce", (Setting("bucket_cap_mb", 1, 25.0),)),
        ({"ddp": {"bucket_cap_mb": 25}}, "all_reduce", ()),
        ({"ddp": {"bucket_cap_mb": 25}}, "broadcast", (Setting("broadcast_buffers", True, False),)),
        ({"ddp": {"bucket_cap_mb": 25, "broadcast_buffers": False}}, "broadcast", ()),
        ({"fsdp": True}, "all_gather", ()),
        ({}, "all_reduce", ()),
    ],
)
def test_fewer_collectives_by_what_they_are(
    tmp_path: Path, model: dict[str, Any], kind: str, settings: tuple[Setting, ...]
) -> None:
    facts = {"device": {"type": "cuda"}, "models": [{"parameters": 1, **model}]}
    job = runs.measured(runs.recorded(tmp_path / "run", (traces.training(3), [], facts)), exchange_plans).job
    changes = fewer_collectives(job, small(kind), 20, 2)
    assert changes[0].settings == settings
    assert bool(settings) or "bucket_cap_mb" not in changes[0].text
    assert changes[0].numerics is (kind == "broadcast" and bool(settings))
