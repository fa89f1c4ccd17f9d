"""The script waits for copies that it need not wait for.

`tensor.to(device)` and `copy_` stop the host until the copy is done, and with it all that was queued before. Where the
memory is pinned, `non_blocking=True` only queues the copy: the device takes it in its turn, and the host meanwhile
launches what comes next. A device that runs dry in that wait has nothing to do until the host has launched again.

Needs a trace of a GPU run, whose copies name their memory: `Memcpy HtoD (Pinned -> Device)`. A copy counts that is
followed by synchronising within the same operator.

Saving: the traced steps replayed with nobody waiting for such copies. The copy itself takes as long as before; that it
could run beside computation is the business of `exposed_copy`.

What to change: `.to(device, non_blocking=True)`. The host must then not write into that memory before the copy is done;
a loader with `pin_memory=True` does not.
"""

from __future__ import annotations

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.breakdown import breakdown, part_least, part_noise
from dlprof.measures.copies import copies, copy_table
from dlprof.measures.replay import own_time, saving
from dlprof.measures.syncs import syncs, together
from dlprof.result import Finding
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import digits, duration, percent

# One word to change, so it is worth saying from where any finding is (diagnosis.LEAST_SHARE).
NOTABLE_SHARE = 0.02

_HOST = ("host", "optimizer_host")


def check(run: Measured) -> Finding | Clear:
    """Look at the device's idle time behind waits for pinned copies, and at what the job would gain without."""
    if settings.on_cpu(run):
        raise NotMeasured("the job trains on the CPU, where nothing is copied to a device")
    frame = run.frame(syncs)
    if len(frame) and frame["together_ns"].isna().all():
        raise NotMeasured("the trace does not link launches to kernels, or holds no work of a device")
    waited = frame[frame["copied"] == "pinned"]
    if not len(waited):
        return Clear("no copy from pinned memory is waited for")
    gains = together(run, waited)
    step = mean_step_ns(run)
    gain = saving(run, gains)
    if gain / step < NOTABLE_SHARE:
        return Clear(f"for {percent(gain / step)} of the step the device idles behind a copy that is waited for")
    worst = max(gains, key=lambda r: gains[r])
    mine = waited[waited["rank"] == worst]
    pin = settings.training_loader(run, worst).get("pin_memory")
    return Finding(
        title="The script waits for copies from pinned memory",
        summary=f"{digits(float(mine['calls'].sum()))} times a step rank {worst} waits until a copy from pinned memory"
        f" is done, {duration(float(mine['ns'].sum()))} a step; the device then idles for"
        f" {duration(float(mine['idle_ns'].sum()))}.",
        verdict=f"{percent(gain / step)} {of_step(run)} the device idles because the script waited for a copy.",
        noise_ns=part_noise(run, *_HOST),
        least_ns=min(gain, part_least(run, *_HOST)),
        saving_ns=gain,
        advice=(
            "`batch = batch.to(device, non_blocking=True)`"
            + (f" (`pin_memory` is {pin})" if pin is not None else "")
            + ", for inputs and labels alike",
        ),
        evidence=copy_table(run.frame(copies), worst),
        ranks=tuple(sorted(r for r, ns in gains.items() if ns and ns >= gains[worst] / 2)),
        sure="Estimated by replaying the traced steps without these waits.",
    )


RULE = Rule(
    "blocking_copy",
    "Waiting for copies from pinned memory",
    (breakdown, copies, own_time, step_means, syncs),
    check,
    saves_from=("input_wait", "host", "optimizer_host", "launch_latency"),
)
