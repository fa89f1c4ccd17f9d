"""What the host was doing while nothing was computed and the host was why."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, per_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import NotMeasured
from dlprof.units import digits

MOST_ROWS = 12

# A forward, a backward and an optimizer's step are some ten kernels in the smallest of models.
FEWEST_KERNELS = 8
PYTHON = "Python, between operators"


@per_rank
def host_work(on_training_thread: pd.DataFrame, timing: Timing, partition: dict[str, iv.Intervals]) -> pd.DataFrame:
    """Split the host's part of the steady traced steps by what ran on the training thread: name, phase, ns a step.

    `name` is the outermost operator or runtime call, or that no operator ran (Python); `phase` the range around it
    (forward, backward, optimizer, a range of the user's), "" for none. Longest first.
    """
    n = max(len(timing.windows), 1)
    idle = iv.merge(partition.get("host", iv.EMPTY), partition.get("optimizer_host", iv.EMPTY))
    calls = on_training_thread[["name", "start_ns", "dur_ns"]]
    calls = host.outermost(calls[host.is_kind(on_training_thread, "op", "runtime", "communication")])
    start = calls["start_ns"].to_numpy()
    end = start + calls["dur_ns"].to_numpy()
    code, names = calls["name"].cat.codes.to_numpy(), calls["name"].cat.categories
    rows: list[tuple[str, str, float]] = []
    for phase, when in _phases(on_training_thread, idle).items():
        # The outermost calls do not overlap, so what each has of the idle time adds up.
        took = np.bincount(code, weights=iv.within(when, start, end), minlength=len(names))
        rows += [(str(names[int(c)]), phase, float(took[c]) / n) for c in np.flatnonzero(took)]
        rows.append((PYTHON, phase, float(iv.total(when) - took.sum()) / n))
    rows = sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])[:MOST_ROWS]
    return pd.DataFrame(
        {
            "name": pd.Series([row[0] for row in rows], dtype="str"),
            "phase": pd.Series([row[1] for row in rows], dtype="str"),
            "ns": pd.Series([row[2] for row in rows], dtype=float),
        }
    )


def _phases(thread: pd.DataFrame, idle: iv.Intervals) -> dict[str, iv.Intervals]:
    """Divide the idle time by the range that the training thread was in."""
    ranges = {
        "forward": ("dlprof::forward", "DistributedDataParallel.forward"),
        "backward": ("dlprof::backward",),
        "optimizer": ("dlprof::optimizer", "Optimizer.step#", "Optimizer.zero_grad#"),
    }
    out, left = {}, idle
    for phase, names in ranges.items():
        out[phase] = iv.intersect(left, host.cover(thread, host.is_named(thread, *names)))
        left = iv.subtract(left, out[phase])
    return {**out, "": left}


@per_rank
def launch_means(device_work: pd.DataFrame, launched_within: Maybe[NDArray[np.int64]], timing: Timing) -> pd.DataFrame:
    """Count the device's kernels in a steady traced step (one row): kernels, mean kernel_ns."""
    kernels = host.is_kind(device_work, "kernel")
    dur = device_work["dur_ns"].to_numpy()[kernels]
    inside = int((kernels & (launched_within.get() >= 0)).sum()) if len(device_work) else 0
    n = max(len(timing.windows), 1)
    return pd.DataFrame({"kernels": [inside / n], "kernel_ns": [float(dur.mean()) if len(dur) else 0.0]})


def check_launches(launch_means: pd.DataFrame) -> None:
    """Raise NotMeasured where the device has so little to do that no step of training is to be seen.

    So it is while something compiles or starts up, or in a part of a trace: that the device idles is true then, and
    what a step without that would be is not known.
    """
    kernels = float(launch_means["kernels"].max())
    if not kernels:
        raise NotMeasured("the trace holds no kernels, and nothing says that the job computes on the CPU")
    if kernels < FEWEST_KERNELS:
        few = f"{digits(kernels)} kernel{'' if kernels == 1 else 's'} a step"
        raise NotMeasured(f"the device ran {few}: that is no training, but compiling, starting up or a part of a trace")
