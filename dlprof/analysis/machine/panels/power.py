"""What a lower power limit would cost in time and save in energy."""

from __future__ import annotations

from dlprof.analysis.engine import Maybe, maybe, needs
from dlprof.analysis.machine.power import PowerModel, power_limits, power_model
from dlprof.analysis.panel import Picture
from dlprof.analysis.throughput.rates import throughput
from dlprof.result import Panel
from dlprof.result.throughput import PowerLimit, Throughput
from dlprof.units import digits

_COLUMNS = ("power limit_share", "limit of each GPU, W", "predicted step_ns", "at least_ns", "at most_ns")


def draw(
    power_model: PowerModel = needs(power_model),
    power_limits: tuple[PowerLimit, ...] = needs(power_limits),
    throughput: Maybe[Throughput] = maybe(throughput),
) -> list[Panel]:
    """List the predicted step and energy at the present power limit and at lower ones."""
    known = throughput.or_none()
    samples = known.samples_per_step if known is not None and known.of == "job" else None
    # The power covers the recorded ranks only.
    unit = (
        "energy of a sample, J" if samples and known and known.gpus == len(power_model.ranks) else "energy of a step, J"
    )
    per = samples if unit == "energy of a sample, J" and samples else 1.0
    rows = tuple(
        (p.share, p.limit_w, p.step_ns, p.least_ns, p.most_ns, float(f"{p.joules / per:.3g}")) for p in power_limits
    )
    least, likely, most = (digits(k) for k in power_model.k)
    source = "fitted to this run" if power_model.fitted else "assumed: the clock did not vary in this run"
    drew = digits(float(power_model.ranks["power_w"].mean()))
    note = (
        "Shares of the limit that was set. At a lower limit a GPU lowers its clock until its power fits: power grows"
        f" with the clock to the power of {likely} ({least} to {most}; {source}), and matrix products slow down as"
        " the clock does. At least: only products slow down. At most: all computation does, and GPUs draw their power"
        f" only while they work. In this run they drew {drew} W on average."
    )
    return [Panel("table", "Predicted step and energy by power limit", rows, (*_COLUMNS, unit), note=note)]


PICTURE = Picture(draw)
