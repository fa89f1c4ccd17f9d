"""The report's facts on throughput: samples and tokens a second, and what an epoch and so many samples take."""

from __future__ import annotations

from dlprof.analysis.engine import Maybe, maybe
from dlprof.analysis.throughput.rates import throughput
from dlprof.result import Fact
from dlprof.result.throughput import Cost, Throughput
from dlprof.units import digits, duration, quantity

SECTION = "Throughput"

_COUNTED_BY = {
    "script": "dlprof.step() in the script",
    "loader": "the loaders' batches",
    "model": "the first dimension of the model's input",
}


def of_throughput(throughput: Maybe[Throughput] = maybe(throughput)) -> list[Fact]:
    """List a job's throughput; of a job without one, why."""
    t = throughput.or_none()
    if t is None:
        return [] if throughput.broke else [Fact(SECTION, "not known", throughput.why())]
    of = " of a rank" if t.of == "rank" else ""
    rows = [
        (f"samples a second{of}", _number(t.samples_per_s)),
        (f"samples a step{of}", _number(t.samples_per_step)),
        (f"tokens a second{of}", _number(t.tokens_per_s)),
        (f"tokens a step{of}", _number(t.tokens_per_step)),
        ("of the job", f"not known: {t.why}" if t.why else ""),
        ("counted by", _COUNTED_BY[t.source]),
    ]
    if t.gpus and t.gpus > 1:
        rows += [
            ("samples a second and GPU", _number(t.samples_per_s and t.samples_per_s / t.gpus)),
            ("tokens a second and GPU", _number(t.tokens_per_s and t.tokens_per_s / t.gpus)),
        ]
    if t.power_w:
        rows += [
            ("energy of a sample", _joules(t.of_samples(1))),
            ("energy of a token", _joules(t.of_tokens(1))),
        ]
    if t.of == "job":
        held = f" ({t.epoch_samples:,} samples)" if t.epoch_samples else ""
        rows += [
            (f"an epoch{held}", described(t.epoch)),
            ("a million samples", described(t.of_samples(1e6))),
            ("a billion tokens", described(t.of_tokens(1e9))),
        ]
    return [Fact(SECTION, name, value) for name, value in rows if value]


def _joules(cost: Cost | None) -> str:
    return "" if cost is None or cost.joules is None else energy(cost.joules)


def _number(value: float | None) -> str:
    return "" if value is None else digits(value)


def described(cost: Cost | None) -> str:
    """Write what a piece of training takes: "2.31 h, 9.24 GPU-hours, 21.4 MJ"; "" of None."""
    if cost is None:
        return ""
    said = [time_taken(cost.seconds)]
    said += [f"{digits(cost.gpu_hours)} GPU-hours"] if cost.gpu_hours is not None else []
    said += [energy(cost.joules)] if cost.joules is not None else []
    return ", ".join(said)


def time_taken(seconds: float) -> str:
    """Write a time of any length: "81.2 ms", "45.0 s", "12.5 min", "2.31 h", "3.10 days"."""
    for least, unit in ((2 * 86_400, 86_400), (5_400, 3_600), (120, 60)):
        if seconds >= least:
            return f"{digits(seconds / unit)} {({86_400: 'days', 3_600: 'h', 60: 'min'})[unit]}"
    return duration(1e9 * seconds)


def energy(joules: float) -> str:
    """Write an energy as people pay for it: "21.4 kJ", "3.20 kWh"."""
    return f"{digits(joules / 3.6e6)} kWh" if joules >= 3.6e5 else quantity(joules, "J")
