"""Which reading of a value is GradScaler's own: it asks whether gradients overflowed before it lets an optimizer step.

For an optimizer that does not take the scale itself `GradScaler.step` reads found_inf back (`_maybe_opt_step` in
torch/amp/grad_scaler.py: an `.item()` a device), so the host waits for the backward pass in every step, and no line of
the script can be blamed. One that is fused (`_step_supports_amp_scaling`) gets found_inf on the device and nothing is
read; the operators that prepare it then stand between any reading of the script and the optimizer's step.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.timeline import host

# What such a reading is called among what the script asked for.
READS = "GradScaler.step"

# It looks for infinities with this, in `unscale_` or in `step`.
_CHECKS = "aten::_amp_"
_ITEM = "aten::item"


def reads(thread: pd.DataFrame, ops: pd.DataFrame) -> iv.Intervals:
    """Return the readings of found_inf: [[start, end), …] in ns of the last operator before an optimizer's step.

    `thread`: the spans of the training thread, `ops`: its outermost operators. Empty where nothing is scaled.
    """
    checked = ops["start_ns"].to_numpy()[host.is_named(ops, _CHECKS)]
    steps = np.sort(thread["start_ns"].to_numpy()[host.is_named(thread, "Optimizer.step#")])
    if not len(checked) or not len(steps):
        return iv.EMPTY
    start = ops["start_ns"].to_numpy()
    end = start + ops["dur_ns"].to_numpy()
    last = np.searchsorted(start, steps, side="left") - 1
    # Since the step before, gradients were looked through: an optimizer of a GAN's other half may go without.
    before = np.concatenate(([np.iinfo(np.int64).min], steps[:-1]))
    scaled = np.searchsorted(checked, steps) > np.searchsorted(checked, before)
    last = last[scaled & (last >= 0)]
    last = last[host.is_named(ops, _ITEM)[last]]
    return iv.union(start[last], end[last])
