"""Which changes would have fitted where memory ran out, from what was counted of an earlier step."""

from __future__ import annotations

from math import isnan
from typing import Any, NamedTuple

import pandas as pd

from dlprof.units import digits, size

_MOST = 5  # changes that are named
_WORTH = 0.02  # less than so much of what was needed is no cure

# What has become so many times what was counted is not what was counted: something grew, or another kind of step ran.
_GROWN = 2.0
_NUMERICS = ("batch", "autocast", "16_bits", "8_bit")


class Cure(NamedTuple):
    """A change in words, with the peak that it is predicted to have, and whether it changes what is computed."""

    text: str
    numerics: bool


def cures(memory_what_if: pd.DataFrame | None, failure: dict[Any, Any]) -> list[Cure]:
    """Return the changes with which the job would have fitted, those that compute the same first, and of these the
    ones that leave most.

    A failure needed what was held and what was asked for. That is taken to be as many times what was counted with a
    change as without: a longer batch than the one that was counted needs more of everything that grows. Nothing where
    what was needed is far more than what was counted.
    """
    held, asked, total = (failure[name] for name in ("allocated_bytes", "requested_bytes", "total_bytes"))
    if memory_what_if is None or isnan(total) or isnan(held):
        return []
    rows = memory_what_if[memory_what_if["change"] != ""]
    if not len(rows) or (str(rows["device"].iloc[0]) == "cpu") != (failure["device"] == "host"):
        return []
    # What was killed had filled the memory, whatever was read last.
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
        "8_bit": "an optimizer with its state in 8 bits",
        "offload": "the optimizer's state on the host",
        "microbatches": f"{value} micro-batches",
        "schedule": f"the pipeline schedule {value}",
    }[change]
