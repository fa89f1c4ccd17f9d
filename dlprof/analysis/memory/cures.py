"""Which changes would have avoided running out of memory, predicted from the memory counted in an earlier step."""

from __future__ import annotations

from math import isnan
from typing import Any, NamedTuple

import pandas as pd

from dlprof.units import digits, size

_MOST = 5  # changes that are named
_WORTH = 0.02  # of the memory needed; changes that save less are not named

# Where a failure needed so many times the counted memory, the count says nothing: memory grew, or another kind of step
# ran.
_GROWN = 2.0
_NUMERICS = ("batch", "autocast", "16_bits", "8_bit")


class Cure(NamedTuple):
    """A change in words, with the predicted peak, and whether it changes the numbers that are computed."""

    text: str
    numerics: bool


def cures(memory_what_if: pd.DataFrame | None, failure: dict[Any, Any]) -> list[Cure]:
    """Return the changes with which the job would have fitted: those that compute the same numbers first, and of these
    the one with the highest predicted peak.

    The job needed the allocated memory and the failed request. The ratio of that to the counted memory is assumed to
    be the same with each change: a longer batch needs more of everything that grows. Returns nothing where the job
    needed far more than was counted.
    """
    held, asked, total = (failure[name] for name in ("allocated_bytes", "requested_bytes", "total_bytes"))
    if memory_what_if is None or isnan(total) or isnan(held):
        return []
    rows = memory_what_if[memory_what_if["change"] != ""]
    if not len(rows) or (str(rows["device"].iloc[0]) == "cpu") != (failure["device"] == "host"):
        return []
    # A process that was killed had filled the memory, whatever was read last.
    needed = held + asked if not isnan(asked) else max(held, total)
    now = float(rows["now_bytes"].iloc[0])
    scale = max(needed / now, 1.0) if now else 1.0
    if scale > _GROWN:
        return []
    found = rows.assign(then=rows["then_bytes"] * scale, numerics=rows["change"].isin(_NUMERICS))
    found = found[(found["then"] <= total) & (found["then"] < needed * (1 - _WORTH))]
    found = found.sort_values(["numerics", "then"], ascending=[True, False], kind="stable").head(_MOST)
    return [
        Cure(f"{named(str(c), str(v))}: about {size(then)} instead of {size(needed)}", bool(n))
        for c, v, then, n in zip(found["change"], found["value"], found["then"], found["numerics"], strict=True)
    ]


def named(change: str, value: str) -> str:
    """Return a change in words, with code as `code`."""
    if change == "batch":
        return f"{digits(float(value))} times the batch"
    if change == "shard":
        stage, _, ranks = value.partition("/")
        how = "`fully_shard` (ZeRO 3)" if stage == "3" else f"ZeRO {stage}"
        return f"{how} over the {ranks} ranks"
    return {
        "autocast": "autocast to 16 bits",
        "16_bits": "model and optimizer in 16 bits",
        **dict.fromkeys(("checkpoint", "checkpoint_only"), f"`torch.utils.checkpoint` around `{value}`"),
        "fused_attention": "`scaled_dot_product_attention`",
        "8_bit": "an optimizer with 8-bit state",
        "offload": "the optimizer state on the host",
        "microbatches": f"{value} micro-batches",
        "schedule": f"the pipeline schedule {value}",
    }[change]
