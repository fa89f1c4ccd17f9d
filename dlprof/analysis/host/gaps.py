"""What the host did while its device had nothing to do, and what cheaper launching would give."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank, within_rank
from dlprof.analysis.step.partition import partition
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import NOT_IN_STEPS, device_work
from dlprof.analysis.timeline.host import in_calls, on_training_thread
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.analysis.timeline.what_if import PAUSE_NS
from dlprof.errors import NotMeasured
from dlprof.units import digits

# Launching an operator from Python takes a host some 10 µs: a shorter kernel cannot hide the next one's launch.
SMALL_NS = 10_000

# A forward, a backward and an optimizer's step are some ten kernels in the smallest of models.
FEWEST_KERNELS = 8

# What ends so shortly before a time of silence ends with what called it.
_SAME_END_NS = 200_000

MOST_ROWS = 10
MOST_WORK = 12
PYTHON = "Python, between operators"

# Frames of Python in a trace with stacks that are not the script's: installed packages, Python's own library, builtins.
_NOT_OWN = re.compile(r"site-packages|dist-packages|/lib/python\d|^<|^torch/|^nn\.Module:|^(?:threading|runpy)\.py")

_PHASES = {
    "forward": ("dlprof::forward", "DistributedDataParallel.forward"),
    "backward": ("dlprof::backward",),
    "optimizer": ("dlprof::optimizer", "Optimizer.step#", "Optimizer.zero_grad#"),
}


# The categories of the step in which the host is late; and what is shorter with a host that is not: it waits for its
# data while the device works.
HOST = ("host", "optimizer_host")


SAVES_FROM = ("input_wait", *HOST, "launch_latency")


@within_rank
def host_gaps(partition: dict[str, iv.Intervals] = needs(partition)) -> iv.Intervals:
    """Return when, in the steady traced steps, nothing is computed because the host is late."""
    return iv.merge(*(partition.get(category, iv.EMPTY) for category in HOST))


@within_rank
def python_gaps(
    host_gaps: iv.Intervals = needs(host_gaps),
    in_calls: iv.Intervals = needs(in_calls),
    spans: Frame = needs(schema.SPANS),
) -> iv.Intervals:
    """Return when the host is late and no thread is in an operator or a runtime call for longer than PAUSE_NS."""
    start = spans["start_ns"].to_numpy()
    whole = np.array([[start[0], (start + spans["dur_ns"].to_numpy()).max()]], dtype=np.int64)
    pauses = iv.subtract(whole, in_calls)
    return iv.intersect(host_gaps, pauses[pauses[:, 1] - pauses[:, 0] > PAUSE_NS])


@per_rank
def host_work(
    on_training_thread: Frame = needs(on_training_thread),
    timing: Timing = needs(timing),
    host_gaps: iv.Intervals = needs(host_gaps),
) -> pd.DataFrame:
    """Split the host's part of the steady traced steps by what ran on the training thread: name, phase, ns a step.

    `name` is the outermost operator or runtime call, or PYTHON where none ran; `phase` the range around it (forward,
    backward, optimizer), "" for none. Longest first.
    """
    calls = on_training_thread[["name", "start_ns", "dur_ns"]]
    calls = host.outermost(calls[host.is_kind(on_training_thread, "op", "runtime", "communication")])
    start = calls["start_ns"].to_numpy()
    end = start + calls["dur_ns"].to_numpy()
    code, names = calls["name"].cat.codes.to_numpy(), [*calls["name"].cat.categories, PYTHON]
    frames, left = [], host_gaps
    for phase in (*_PHASES, ""):
        thread = on_training_thread
        when = iv.intersect(left, host.cover(thread, host.is_named(thread, *_PHASES[phase]))) if phase else left
        left = iv.subtract(left, when)
        # The outermost calls do not overlap, so what each has of the idle time adds up.
        took = np.bincount(code, weights=iv.within(when, start, end), minlength=len(names))
        took[-1] = iv.total(when) - took.sum()
        frames.append(pd.DataFrame({"name": names, "phase": phase, "ns": took / max(len(timing.windows), 1)}))
    work = pd.concat(frames, ignore_index=True)
    work = work[work["ns"] > 0].sort_values("ns", ascending=False, kind="stable", ignore_index=True)
    return work.head(MOST_WORK).astype({"name": "str", "phase": "str"})


@per_rank
def own_python(
    on_training_thread: Frame = needs(on_training_thread),
    python_gaps: iv.Intervals = needs(python_gaps),
    timing: Timing = needs(timing),
) -> pd.DataFrame:
    """List the script's own functions that the device waited for, where the trace has Python's stacks: function, ns.

    `ns` is the time a steady traced step in which the host was late, in no operator, and in this function or in a
    library that it had called. The longest first; empty where the trace has no stacks.
    """
    frames = on_training_thread[["name", "start_ns", "dur_ns"]][host.is_kind(on_training_thread, "python")]
    frames = frames.assign(name=frames["name"].cat.remove_unused_categories())
    names = frames["name"].cat.categories.tolist()
    own = np.array([".py(" in name and not _NOT_OWN.search(name) for name in names], dtype=bool)
    frames = frames[own[frames["name"].cat.codes.to_numpy()]]
    start = frames["start_ns"].to_numpy()
    end = start + frames["dur_ns"].to_numpy()
    inside = iv.within(python_gaps, start, end).astype(float)
    around = host.parents(start, end)
    within = around >= 0
    np.subtract.at(inside, around[within], inside[within])
    took = np.bincount(frames["name"].cat.codes.to_numpy(), np.maximum(inside, 0.0), len(names))
    functions = pd.DataFrame({"function": names, "ns": took / max(len(timing.windows), 1)})
    functions = functions[functions["ns"] > 0].sort_values("ns", ascending=False, kind="stable", ignore_index=True)
    return functions.head(MOST_ROWS).astype({"function": "str"})


@per_rank
def longest_silence(
    on_training_thread: Frame = needs(on_training_thread),
    timing: Timing = needs(timing),
    steps: Maybe[Frame] = maybe(schema.STEPS),
) -> pd.DataFrame:
    """Return the longest time of a step in which the training thread calls nothing: one row, ns, after, before, loader.

    `ns`: of the mean traced step, at the place where most such times are: `after` and `before` are what ends and begins
    around it, numbers as #. `loader`: whether the trace shows what fetches batches, which is then not what waits there.
    Without rows where no step has such a time, or the step log says what each is made of.
    """
    empty = pd.DataFrame({"ns": [], "after": [], "before": [], "loader": []})
    shown = on_training_thread[~host.is_kind(on_training_thread, "python")]
    called = host.cover(shown, ~host.is_kind(shown, "annotation"))
    silent = iv.intersect(iv.subtract(timing.host_windows, called), iv.merge(timing.host_windows))
    if steps or timing.unit != "step" or not len(silent) or not len(called):
        return empty
    took, step = silent[:, 1] - silent[:, 0], np.searchsorted(timing.host_windows[:, 0], silent[:, 0], side="right") - 1
    order = np.lexsort((-took, step))
    longest = order[np.diff(step[order], prepend=-1) != 0]
    start = shown["start_ns"].to_numpy()
    names = host.written(shown["name"])
    before = np.minimum(np.searchsorted(start, silent[longest, 1]), len(shown) - 1)
    marks = np.flatnonzero(host.is_kind(shown, "annotation"))
    marks = marks[np.argsort((start + shown["dur_ns"].to_numpy())[marks], kind="stable")]
    ends = (start + shown["dur_ns"].to_numpy())[marks]
    places = []
    for (begin, until), following in zip(silent[longest].tolist(), before.tolist(), strict=True):
        # Of the ranges that end there, the outermost, which began first.
        ended = marks[np.searchsorted(ends, begin - _SAME_END_NS) : np.searchsorted(ends, until)]
        ended = ended[start[ended] < begin]
        ahead = names[ended[np.argmin(start[ended])]] if len(ended) else ""
        places.append((re.sub(r"\d+", "#", str(ahead)), re.sub(r"\d+", "#", str(names[following]))))
    by_place = pd.DataFrame(places, columns=["after", "before"]).assign(ns=took[longest] / len(timing.host_windows))
    summed: pd.DataFrame = by_place.groupby(["after", "before"])[["ns"]].sum().sort_values("ns", ascending=False)
    fetched = bool(host.is_kind(shown, "fetch").any())
    found: pd.DataFrame = summed.head(1).reset_index().assign(loader=fetched)[list(empty)]
    return found


@per_rank
def launch_means(
    device_work: Frame = needs(device_work),
    launched_within: Maybe[NDArray[np.int64]] = maybe(launched_within),
    timing: Timing = needs(timing),
) -> pd.DataFrame:
    """Count the device's kernels in a steady traced step (one row): kernels, mean kernel_ns."""
    kernels = host.is_kind(device_work, "kernel")
    dur = device_work["dur_ns"].to_numpy()[kernels]
    inside = np.count_nonzero(kernels & (launched_within.get() >= 0)) if len(device_work) else 0
    count = inside / max(len(timing.windows), 1)
    return pd.DataFrame({"kernels": [count], "kernel_ns": [float(dur.mean()) if len(dur) else 0.0]})


def check_launches(launch_means: pd.DataFrame) -> None:
    """Raise NotMeasured where the device has so little to do that no step of training is to be seen.

    So it is while something compiles or starts up, or in a part of a trace: that the device idles is true then, and
    what a step without that would be is not known.
    """
    kernels = float(launch_means["kernels"].max())
    if not kernels and launch_means["kernel_ns"].any():
        raise NotMeasured(NOT_IN_STEPS)
    if not kernels:
        raise NotMeasured("the trace holds no kernels (record ProfilerActivity.CUDA; with nsys, --trace=cuda)")
    if kernels < FEWEST_KERNELS:
        few = f"{digits(kernels)} kernel{'' if kernels == 1 else 's'} a step"
        raise NotMeasured(f"the device ran {few}: that is no training, but compiling, starting up or a part of a trace")
