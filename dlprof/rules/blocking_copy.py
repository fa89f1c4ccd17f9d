"""The script waits for copies that it need not wait for.

`tensor.to(device)` and `copy_` stop the host until the copy is done, and with it all that was queued before. Where the
memory is pinned, `non_blocking=True` only queues the copy: the device takes it in its turn, and the host meanwhile
launches what comes next. A device that runs dry in that wait has nothing to do until the host has launched again.

Needs a trace of a GPU run, whose copies name their memory: `Memcpy HtoD (Pinned -> Device)`. A copy counts that is
followed by synchronising within the same operator.

Saving: the time in which the device has nothing because the host waited for such a copy. The copy itself takes as long
as before; that it could run beside computation is the business of `exposed_copy`.

What to change: `.to(device, non_blocking=True)`. The host must then not write into that memory before the copy is done;
a loader with `pin_memory=True` does not.
"""

from __future__ import annotations

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.breakdown import breakdown, part, part_noise
from dlprof.measures.copies import copies, copy_table
from dlprof.measures.replay import own_time, saving
from dlprof.measures.steps import mean_step_ns, of_step, step_means
from dlprof.measures.syncs import syncs
from dlprof.result import Finding
from dlprof.units import digits, duration, percent

# One word to change, so it is worth saying from where any finding is (diagnosis.LEAST_SHARE).
NOTABLE_SHARE = 0.02

_HOST = ("host", "optimizer_host")


def check(run: Measured) -> Finding | Clear:
    """Look at the device's idle time behind waits for pinned copies, and at what the job would gain without."""
    if settings.on_cpu(run):
        raise NotMeasured("the job trains on the CPU, where nothing is copied to a device")
    frame = run.frame(syncs)
    if frame["idle_ns"].isna().any():
        raise NotMeasured("the trace holds no work of a device")
    waited = frame[frame["pinned"] == 1]
    if not len(waited):
        return Clear("no copy from pinned memory is waited for")
    late = part(run, *_HOST)
    # As for host_sync: of the host's part of the untraced steps these waits have the same share as of the traced ones'.
    of_host = (waited.groupby("rank")["idle_ns"].sum() / frame.groupby("rank")["host_ns"].first()).fillna(0.0)
    idle = {r: ns * float(of_host.get(r, 0.0)) for r, ns in late.items()}
    step = mean_step_ns(run)
    gain = saving(run, idle)
    if gain / step < NOTABLE_SHARE:
        return Clear(f"for {percent(gain / step)} of the step the device idles behind a copy that is waited for")
    worst = max(idle, key=lambda r: idle[r])
    mine = waited[waited["rank"] == worst]
    pin = settings.training_loader(run, worst).get("pin_memory")
    return Finding(
        title="The script waits for copies from pinned memory",
        summary=f"{digits(float(mine['calls'].sum()))} times a step rank {worst} waits until a copy from pinned memory"
        f" is done, {duration(float(mine['ns'].sum()))} a step; the device then idles for {duration(idle[worst])}.",
        verdict=f"{percent(gain / step)} {of_step(run)} the device idles because the script waited for a copy.",
        noise_ns=part_noise(run, *_HOST),
        saving_ns=gain,
        advice=(
            "`batch = batch.to(device, non_blocking=True)`"
            + (f" (`pin_memory` is {pin})" if pin is not None else "")
            + ", for inputs and labels alike",
        ),
        evidence=copy_table(run.frame(copies), worst),
        ranks=tuple(sorted(r for r, ns in idle.items() if ns and ns >= idle[worst] / 2)),
        sure="The idle time behind these waits in the traced steps, as a share of all in which the device waits for the"
        " host. Part of it may stay, where the host is not faster than its device.",
    )


RULE = Rule(
    "blocking_copy",
    "Waiting for copies from pinned memory",
    (breakdown, copies, own_time, step_means, syncs),
    check,
    saves_from=_HOST,
)
