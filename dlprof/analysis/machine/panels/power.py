"""What a lower power limit would cost in time, and save in energy."""

from __future__ import annotations

from dlprof.analysis.engine import Maybe
from dlprof.analysis.machine.power import PowerModel
from dlprof.analysis.panel import Picture
from dlprof.result import Panel
from dlprof.result.throughput import PowerLimit, Throughput
from dlprof.units import digits

_COLUMNS = ("power limit_share", "of each GPU, W", "predicted step_ns", "at least_ns", "at most_ns")


def draw(power_model: PowerModel, power_limits: tuple[PowerLimit, ...], throughput: Maybe[Throughput]) -> list[Panel]:
    """List the predicted step and energy at lower limits than the one that is set."""
    known = throughput.or_none()
    samples = known.samples_per_step if known is not None and known.of == "job" else None
    # Of ranks without a recording the GPUs are not counted.
    unit = (
        "energy of a sample, J" if samples and known and known.gpus == len(power_model.ranks) else "energy of a step, J"
    )
    per = samples if unit == "energy of a sample, J" and samples else 1.0
    rows = tuple(
        (p.share, p.limit_w, p.step_ns, p.least_ns, p.most_ns, float(f"{p.joules / per:.3g}")) for p in power_limits
    )
    least, likely, most = (digits(k) for k in power_model.k)
    source = "this run's clocks and power" if power_model.fitted else "no clock of this run varied: assumed"
    ranks = power_model.ranks
    note = (
        "Of the limit that was set. Its clock falls until a GPU's power fits: power grows as the clock to the power of"
        f" {likely} ({least} to {most}; {source}), and products take as much longer as the clock is lower. At least:"
        " only products do; at most: all computation does, and all power is of the time in which the GPU works."
        f" They took {digits(float(ranks['power_w'].mean()))} W on the mean."
    )
    return [Panel("table", "Power limit, time and energy", rows, (*_COLUMNS, unit), note=note)]


PICTURE = Picture(draw)
