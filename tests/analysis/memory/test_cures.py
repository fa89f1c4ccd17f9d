"""Which changes would have fitted, with which peak; none where what was counted is not what ran out."""

from __future__ import annotations

from math import nan
from typing import Any

import pandas as pd

from dlprof.analysis.memory.failures import cures, named

GB = 10**9


def changes(*then: tuple[str, str, float]) -> pd.DataFrame:
    """Return what changes make of a peak of 80 GB: change, value, GB then."""
    rows = [("", "", 80), *then]
    frame = pd.DataFrame([(c, v, n * GB) for c, v, n in rows], columns=["change", "value", "then_bytes"])
    return frame.assign(now_bytes=80.0 * GB, device="cuda:0")


def failure(asked: float = 4 * GB, held: float = 76 * GB, total: float = 79 * GB, device: str = "0") -> dict[str, Any]:
    return {"allocated_bytes": held, "requested_bytes": asked, "total_bytes": total, "device": device}


CHECKPOINTS = ("checkpoint", "layers.*", 50.0)
KNOWN = changes(("batch", "0.5", 45), CHECKPOINTS, ("8_bit", "", 70), ("offload", "", 60), ("shard", "1/2", 78.9))


def test_changes_that_fit_are_named_with_their_peak_and_those_that_compute_the_same_first() -> None:
    found = cures(KNOWN, failure())
    assert [c.text for c in found] == [
        "the optimizer state on the host: about 60 GB instead of 80 GB",
        "`torch.utils.checkpoint` around `layers.*`: about 50 GB instead of 80 GB",
        "an optimizer with 8-bit state: about 70 GB instead of 80 GB",
        "0.50 times the batch: about 45 GB instead of 80 GB",
    ]  # sharding leaves hardly less than was needed
    assert [c.numerics for c in found] == [False, False, True, True]


def test_a_longer_batch_than_was_counted_needs_more_of_all_that_is_left() -> None:
    # 96 GB are needed where 80 were counted: 1.2 times what each change leaves, of which 8 bits no longer fit.
    found = cures(changes(CHECKPOINTS, ("8_bit", "", 70)), failure(asked=20 * GB))
    assert [c.text for c in found] == ["`torch.utils.checkpoint` around `layers.*`: about 60 GB instead of 96 GB"]


def test_what_was_not_counted_is_not_cured() -> None:
    assert cures(None, failure()) == []
    assert cures(KNOWN, failure(total=nan)) == []
    assert cures(KNOWN, failure(held=nan)) == []
    assert cures(KNOWN, failure(device="host")) == []
    # Twice of what was counted and more: something else has grown.
    assert cures(KNOWN, failure(asked=100 * GB)) == []


def test_a_killed_process_had_filled_the_memory() -> None:
    frame = changes(CHECKPOINTS).assign(device="cpu")
    found = cures(frame, failure(asked=nan, held=70 * GB, total=80 * GB, device="host"))
    assert [c.text for c in found] == ["`torch.utils.checkpoint` around `layers.*`: about 50 GB instead of 80 GB"]


def test_every_change_has_words() -> None:
    words = {named(c, v) for c, v in (("shard", "1/8"), ("shard", "3/8"), ("microbatches", "16"), ("schedule", "1F1B"))}
    assert words == {
        "ZeRO 1 over the 8 ranks",
        "`fully_shard` (ZeRO 3) over the 8 ranks",
        "16 micro-batches",
        "the pipeline schedule 1F1B",
    }
