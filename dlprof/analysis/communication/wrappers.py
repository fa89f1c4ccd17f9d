"""What wrappers do besides training the model: FSDP2's work on its units, DDP's search, DataParallel's copying."""

from __future__ import annotations

import re
from contextlib import suppress

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs, per_rank
from dlprof.analysis.step.partition import exposed_communication, partition
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work, exchanges_on_host
from dlprof.analysis.timeline.host import is_on_device, on_training_thread
from dlprof.analysis.timeline.steady import standard_error
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import DoesNotApply, NotMeasured

# FSDP2 names what it does, and the module that it does it for; the outermost one has no name.
_UNIT = re.compile(r"FSDP::pre_forward(?: \(([^,)]*).*\))?$")

# As PyTorch names it in a trace; the training thread does it after each forward pass.
_SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"

# What it does as it fills its buckets with gradients, and empties them again.
_REDUCER = ("torch::distributed::reducer::", "torch.distributed.ddp.reducer::copy_bucket")

# Both as the recorder's ranges name them.
_FORWARD, _MODULE = "DistributedDataParallel.forward", "nn.Module: "

DATA_PARALLEL = "DataParallel.forward"
_REDUCING = ("BroadcastBackward", "ReduceAddCoalesced")
_REPLICATION = ("Broadcast", "Scatter", "Gather", *_REDUCING)

# The backward pass' share of a step's computing: the gradients of a layer's inputs, and those of its weights, take as
# much each as its forward pass.
_BACKWARD = 2 / 3


@per_rank
def sharding(
    on_training_thread: Frame = needs(on_training_thread),
    timing: Timing = needs(timing),
    exposed_communication: Maybe[iv.Intervals] = maybe(exposed_communication),
) -> pd.DataFrame:
    """Return one row: units (modules that FSDP2 shards by themselves), parents (modules right above them), around_ns.

    around_ns is what the training thread spends in FSDP2 in a mean steady step, without exposed communication. The
    outermost unit is its own parent. Raises NotMeasured where nothing names FSDP2's work.
    """
    theirs = on_training_thread[host.is_named(on_training_thread, "FSDP::")]
    units = {found[1] or "" for n in theirs["name"].unique() if (found := _UNIT.match(str(n)))}
    if not units or not len(timing.windows):
        raise NotMeasured("no work of FSDP2's was traced")
    spent = iv.intersect(iv.merge(timing.windows), iv.subtract(host.cover(theirs), exposed_communication.get()))
    # The traced steps are longer than the others, and this part of them by as much.
    around = iv.total(spent) / iv.total(iv.merge(timing.windows)) * timing.step_ns
    parents = {unit.rpartition(".")[0] for unit in units}
    return pd.DataFrame({"units": [len(units)], "parents": [len(parents)], "around_ns": [around]})


@per_rank
def unused_searches(
    on_training_thread: Frame = needs(on_training_thread),
    timing: Timing = needs(timing),
    spans: Frame = needs(schema.SPANS),
    exchanges_on_host: bool = needs(exchanges_on_host),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    exposed_communication: Maybe[iv.Intervals] = maybe(exposed_communication),
) -> pd.DataFrame:
    """Return for each steady traced step: step, search_ns (DDP's search for unused parameters), flags_ns (the exposed
    part of the all_reduce that shares what was used).
    """
    windows = timing.windows
    search = iv.intersect(iv.merge(windows), host.cover(on_training_thread, host.is_named(on_training_thread, _SEARCH)))
    if not len(search):
        raise NotMeasured("the traced steps show no search for unused parameters")
    flags = iv.intersect(_flags(spans, exchanges_on_host, is_on_device, windows), exposed_communication.get())
    return pd.DataFrame(
        {
            "step": timing.numbers if len(timing.numbers) else np.arange(len(windows)),
            "search_ns": _per_step(timing, search),
            "flags_ns": _per_step(timing, flags),
        }
    )


@per_rank
def buffer_copies(
    on_training_thread: Frame = needs(on_training_thread),
    timing: Timing = needs(timing),
    exchanges_on_host: bool = needs(exchanges_on_host),
) -> pd.DataFrame:
    """Return what DDP's copies of buffers, into what is sent and back, take of a mean steady step: ns, one row.

    They are the operators between the beginning of its forward pass and that of the module in it. Raises NotMeasured
    where devices exchange, whose copies are not the host's, or where modules were not traced.
    """
    spans, windows = on_training_thread, timing.windows
    begins = spans["start_ns"].to_numpy()[host.is_named(spans, _FORWARD)]
    modules = np.sort(spans["start_ns"].to_numpy()[host.is_named(spans, _MODULE)])
    after = np.searchsorted(modules, begins)
    if not exchanges_on_host or not len(windows) or not len(modules) or not len(begins):
        raise NotMeasured("what copying buffers takes was not traced")
    known = after < len(modules)
    before = iv.merge(np.column_stack([begins[known], modules[after[known]]]))
    return _mean(timing, iv.intersect(host.cover(spans, host.is_kind(spans, "op")), before))


@per_rank
def bucket_copies(
    on_training_thread: Frame = needs(on_training_thread),
    timing: Timing = needs(timing),
    exchanges_on_host: bool = needs(exchanges_on_host),
) -> pd.DataFrame:
    """Return what DDP computes of a mean steady step as it fills its buckets and empties them: ns, one row.

    Raises NotMeasured where devices exchange, whose work is not the host's, or where none of it was traced.
    """
    own = host.is_kind(on_training_thread, "op") & host.is_named(on_training_thread, *_REDUCER)
    if not exchanges_on_host or not len(timing.windows) or not own.any():
        raise NotMeasured("what filling DDP's buckets takes was not traced")
    return _mean(timing, host.cover(on_training_thread, own))


def _mean(timing: Timing, spent: iv.Intervals) -> pd.DataFrame:
    """Return how much of a mean steady step some time is, ns, as one row."""
    windows = iv.merge(timing.windows)
    return pd.DataFrame({"ns": [iv.total(iv.intersect(windows, spent)) / iv.total(windows) * timing.step_ns]})


@across_ranks
def unused_search(unused_searches: Frame = needs(unused_searches), job: Job = needs(JOB)) -> pd.DataFrame:
    """Return the same for each rank's mean steady traced step, and noise_ns, the standard error of their sum.

    A rank that is early at the flags would else wait in the next exchange: a step's least over all ranks counts.
    """
    each = unused_searches
    if not job.missing_ranks:
        each = each.assign(flags_ns=each.groupby("step")["flags_ns"].transform("min"))
    means = each.groupby("rank")[["search_ns", "flags_ns"]].mean()
    # The ranks do the same: a step's mean over them is one value.
    both = (each["search_ns"] + each["flags_ns"]).groupby(each["step"]).mean().to_numpy(dtype=float)
    return means.assign(noise_ns=standard_error(both)).reset_index()


def _per_step(timing: Timing, time: iv.Intervals) -> NDArray[np.float64]:
    """Return how much of some time lies in each steady traced step, ns."""
    return iv.per_slot(time, timing.edges).astype(float)


def _flags(spans: pd.DataFrame, on_host: bool, is_on_device: NDArray[np.bool_], windows: iv.Intervals) -> iv.Intervals:
    """Return the time in which only the flags are reduced: whole numbers, or the last that a step reduces."""
    reduces = host.is_kind(spans, "communication") & host.is_one_of(spans["collective"], "all_reduce")
    mine = reduces & (host.is_named(spans, "gloo:", "mpi:") & ~is_on_device if on_host else is_on_device)
    flags = mine & host.is_one_of(spans["dtype"], "int32", "int64")
    if not flags.any():
        if not on_host:
            return iv.EMPTY
        rows = np.flatnonzero(mine)
        first, end = np.searchsorted(spans["start_ns"].to_numpy()[rows], windows).T
        # One alone would be the gradients'.
        flags[rows[end[end - 1 > first] - 1]] = True
    return iv.subtract(host.cover(spans, flags), host.cover(spans, mine & ~flags))


@per_rank
def replication(
    spans: Frame = needs(schema.SPANS),
    timing: Timing = needs(timing),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    device_work: Frame = needs(device_work),
    what_if: Maybe[WhatIf] = maybe(what_if),
    partition: Maybe[dict[str, iv.Intervals]] = maybe(partition),
) -> pd.DataFrame:
    """Return one row, ns of a steady traced step: forward_ns (of the host inside DataParallel), copying_ns (of model,
    inputs, outputs and gradients) and its noise_ns, gain_ns (how much shorter the mean steady step would be without),
    reduced_ns (an all-reduce of the gradients between the trace's devices, at the speed at which they are added up on
    the first one) and backward_ns (computing that can hide it).

    Copying is the device's with nothing computed meanwhile, and the host's where the trace links no launch to what it
    launched. Raises DoesNotApply where the trace has no DataParallel.
    """
    steps = iv.merge(timing.windows)
    on_host = ~is_on_device
    inside = host.cover(spans, on_host & host.is_named(spans, DATA_PARALLEL))
    forward = iv.intersect(iv.merge(timing.host_windows), inside)
    if not len(forward):
        raise DoesNotApply("the model is not in nn.DataParallel: the traced steps show none")
    calls = on_host & host.is_named(spans, *_REPLICATION)
    reduces = calls & host.is_named(spans, *_REDUCING)
    copying, reducing = host.cover(spans, calls), host.cover(spans, reduces)
    rows = _launched_in(spans, device_work, calls)
    if rows.any():
        others = host.cover(device_work, ~rows & host.is_kind(device_work, "kernel"))
        copying = iv.subtract(host.cover(device_work, rows), others)
        reducing = iv.subtract(host.cover(device_work, _launched_in(spans, device_work, reduces)), others)
    each = _per_step(timing, iv.intersect(steps, copying))
    gain = float(each.mean())
    with suppress(NotMeasured):
        whatif = what_if.get()
        durations = np.where(rows[whatif.replay.rows], -1, whatif.replay.durations)
        replayed = whatif.gain_ns(durations=durations, other=((host.cover(spans, calls), 0.0),))
        gain = replayed if rows.any() and np.isfinite(replayed) else gain
    # An all-reduce moves so many times the bytes of a reduction to one device (nccl-tests, PERFORMANCE.md).
    devices = len({str(lane).partition(":")[0] for lane in device_work["lane"].unique()})
    times = 2 * (devices - 1) / devices if devices > 1 else 1.0
    reduced = times * iv.total(iv.intersect(steps, reducing))
    backward = _BACKWARD * iv.total(partition.get().get("computation", iv.EMPTY))
    per_step = {"forward_ns": iv.total(forward), "reduced_ns": reduced, "backward_ns": backward}
    row = {name: ns / len(timing.windows) for name, ns in per_step.items()}
    return pd.DataFrame([row | {"copying_ns": each.mean(), "noise_ns": standard_error(each), "gain_ns": gain}])


def _launched_in(spans: pd.DataFrame, device_work: pd.DataFrame, calls: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows of the device's work were launched within some spans of the host, by the same thread."""
    lane, start = spans["lane"].cat.codes.to_numpy(), spans["start_ns"].to_numpy()
    launching = host.is_kind(spans, "runtime") & (spans["launch"].to_numpy() >= 0)
    found = np.zeros(len(spans), dtype=bool)
    for thread in np.unique(lane[calls]):
        mine = launching & (lane == thread)
        found[mine] = iv.holds(host.cover(spans, calls & (lane == thread)), start[mine])
    return host.is_among(device_work["launch"].to_numpy(), spans["launch"].to_numpy()[found])
