"""Why a device has nothing to do, what filled the host's part of it, and what cheaper launching would give."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, per_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets
from dlprof.analysis.timeline.idle import Idle
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.what_if import GRAPH_GAP_NS, PAUSE_NS, WhatIf
from dlprof.errors import NotMeasured

# Launching an operator from Python takes a host some 10 µs: a shorter kernel cannot hide the next one's launch.
SMALL_NS = 10_000

MOST_ROWS = 10

# Of a step: the script's own Python that takes less gains what it takes, and is not worth a replay.
NOTABLE_SHARE = 0.05

# Frames of Python in a trace with stacks that are not the script's: installed packages, Python's own library, builtins.
_NOT_OWN = re.compile(r"site-packages|dist-packages|/lib/python\d|^<|^torch/|^nn\.Module:|^(?:threading|runpy)\.py")


@per_rank
def gaps(
    spans: pd.DataFrame,
    timing: Maybe[Timing],
    idle: Idle,
    partition: dict[str, iv.Intervals],
    in_calls: iv.Intervals,
    what_if: Maybe[WhatIf],
    on_training_thread: Maybe[pd.DataFrame],
    device_work: pd.DataFrame,
) -> pd.DataFrame:
    """Divide the device's idle time of a steady traced step by its cause: one row, in ns.

    launching_ns: the host was late, in operators, the runtime, or on its way between them. python_ns: it was late, and
    in neither for longer than PAUSE_NS. latency_ns, queued_ns: launched in time. What the host itself waited for (a
    loader, a stall) is in none of them. small_ns: what of launching and latency lies behind kernels too short to hide a
    launch. graph_gain_ns and python_gain_ns: how much shorter the mean steady step would be with the launches of a
    captured graph, and without the script's own Python (NaN: the trace does not link launches to kernels).
    Raises NotMeasured where the trace holds no work of a device.
    """
    windows = iv.merge(timing.get().windows)
    hosts = iv.merge(partition.get("host", iv.EMPTY), partition.get("optimizer_host", iv.EMPTY))
    python = iv.intersect(hosts, _pauses(in_calls, spans))
    launching = iv.subtract(hosts, python)
    latency = iv.intersect(idle.latency, windows)
    graph_gain, python_gain = _gains(what_if, on_training_thread, timing, hosts, launching, python, latency)
    found = {
        "launching_ns": iv.total(launching),
        "python_ns": iv.total(python),
        "latency_ns": iv.total(latency),
        "queued_ns": iv.total(iv.intersect(idle.queued, windows)),
        "small_ns": iv.total(_behind_small(device_work, launching)) + iv.total(_behind_small(device_work, latency)),
    }
    n = max(len(timing.get().windows), 1)
    row = {name: [ns / n] for name, ns in found.items()}
    return pd.DataFrame({**row, "graph_gain_ns": [graph_gain], "python_gain_ns": [python_gain]})


def _pauses(in_calls: iv.Intervals, spans: pd.DataFrame) -> iv.Intervals:
    """Return when no thread was in an operator or in a call of the runtime, for longer than PAUSE_NS."""
    start = spans["start_ns"].to_numpy()
    whole = np.array([[start[0], (start + spans["dur_ns"].to_numpy()).max()]], dtype=np.int64)
    pauses = iv.subtract(whole, in_calls)
    return pauses[pauses[:, 1] - pauses[:, 0] > PAUSE_NS]


def _gains(
    what_if: Maybe[WhatIf],
    on_training_thread: Maybe[pd.DataFrame],
    timing: Maybe[Timing],
    hosts: iv.Intervals,
    launching: iv.Intervals,
    python: iv.Intervals,
    latency: iv.Intervals,
) -> tuple[float, float]:
    """Replay the steps with a graph's launches, and without the script's own Python.

    Neither gains more than the device idles for what it changes: a host with less to do would also hide more of its
    waits for data, but those are not what the change is for. Collectives and copies that begin sooner might be hidden
    better, but they wait for others.
    """
    try:
        asked = what_if.get()
    except NotMeasured:
        return np.nan, np.nan
    # What captures the model's forward and backward pass leaves the optimizer's launches as they are.
    thread = on_training_thread.get()
    optimizer = host.cover(thread, host.is_named(thread, "Optimizer.step#", "dlprof::optimizer"))
    graph = asked.gain_ns(calls=0.0, other=((optimizer, 1.0),), gap_ns=GRAPH_GAP_NS) if len(launching) else 0.0
    step = asked.measured_ns / max(asked.step_ns, 1.0) / max(len(timing.get().windows), 1)
    alone = iv.total(python) * step
    if alone >= NOTABLE_SHARE * asked.measured_ns:
        alone = min(asked.gain_ns(python=0.0), iv.total(hosts) * step)
    return min(graph, (iv.total(launching) + iv.total(latency)) * step), alone


def _behind_small(device_work: pd.DataFrame, idle: iv.Intervals) -> iv.Intervals:
    """Return the idle time that follows a kernel too short to hide a launch."""
    end = device_work["start_ns"].to_numpy() + device_work["dur_ns"].to_numpy()
    order = np.argsort(end, kind="stable")
    at = np.searchsorted(end[order], idle[:, 0], side="right") - 1
    small = (host.is_kind(device_work, "kernel") & (device_work["dur_ns"].to_numpy() < SMALL_NS))[order]
    return idle[(at >= 0) & small[np.maximum(at, 0)]] if len(device_work) else iv.EMPTY


@per_rank
def own_python(
    spans: pd.DataFrame,
    on_training_thread: pd.DataFrame,
    partition: Maybe[dict[str, iv.Intervals]],
    in_calls: Maybe[iv.Intervals],
    timing: Maybe[Timing],
) -> pd.DataFrame:
    """List the script's own functions that the device waited for, where the trace has Python's stacks: function, ns.

    `ns` is the time a steady traced step in which the host was late, in no operator, and in this function or in a
    library that it had called. The longest first; empty where the trace has no stacks.
    """
    none = pd.DataFrame({"function": pd.Series([], dtype="str"), "ns": []})
    if not host.is_kind(spans, "python").any():
        return none
    frames = on_training_thread[["name", "start_ns", "dur_ns"]][host.is_kind(on_training_thread, "python")]
    names = [str(name) for name in frames["name"].cat.categories]
    own = np.array([not _NOT_OWN.search(name) and ".py(" in name for name in names], dtype=bool)
    frames = frames[own[frames["name"].cat.codes.to_numpy()]] if len(own) else frames
    if not len(frames):
        return none
    parts = partition.get()
    hosts = iv.merge(parts.get("host", iv.EMPTY), parts.get("optimizer_host", iv.EMPTY))
    late = iv.intersect(hosts, _pauses(in_calls.get(), spans))
    start = frames["start_ns"].to_numpy()
    end = start + frames["dur_ns"].to_numpy()
    inside = iv.within(late, start, end).astype(float)
    around = host.parents(start, end)
    within = around >= 0
    np.subtract.at(inside, around[within], iv.within(late, start, end)[within])
    code = frames["name"].cat.codes.to_numpy()
    took = np.bincount(code, np.maximum(inside, 0.0), len(names)) / max(len(timing.get().windows), 1)
    most = [i for i in np.argsort(-took, kind="stable")[:MOST_ROWS] if took[i] > 0]
    return pd.DataFrame({"function": pd.Series([names[i] for i in most], dtype="str"), "ns": took[most]})


@per_rank
def small_kernels(
    device_sets: DeviceSets,  # noqa: ARG001 - required: of a trace without a device nothing is known
    timing: Timing,
    device_work: pd.DataFrame,
    launched_within: NDArray[np.int64],
) -> pd.DataFrame:
    """Count the kernels below SMALL_NS in a steady traced step by name, the most frequent first: name, count, mean_ns.

    With a column `kernels`: how many of any length there are. Raises NotMeasured without work of a device.
    """
    n = max(len(timing.windows), 1)
    inside = (launched_within >= 0) & host.is_kind(device_work, "kernel")
    dur, name = device_work["dur_ns"].to_numpy(), device_work["name"].cat
    small = inside & (dur < SMALL_NS)
    code, names = name.codes.to_numpy()[small], name.categories
    count = np.bincount(code, minlength=len(names))
    took = np.bincount(code, weights=dur[small], minlength=len(names))
    most = np.argsort(-count, kind="stable")[:MOST_ROWS]
    most = most[count[most] > 0]
    return pd.DataFrame(
        {
            "name": names[most].astype("str"),
            "count": count[most] / n,
            "mean_ns": took[most] / count[most],
            "small": np.count_nonzero(small) / n,
            "kernels": np.count_nonzero(inside) / n,
        }
    )
