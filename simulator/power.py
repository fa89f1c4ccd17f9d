"""How much power a simulated GPU takes at a clock, and the clock that a power limit leaves it."""

from __future__ import annotations

from simulator.hardware import Device

# What a busy GPU takes of its limit at its highest clock (as the logs have it), and how much of that switches: the rest
# leaks, or is the memory's. Switching takes c·f·V²; the voltage falls with the clock until it is at its least.
BUSY = 0.8
_SWITCHING = 0.7
_LEAST_VOLTAGE = 0.75  # of that at the highest clock


def power_w(device: Device, clock: float) -> float:
    """Return what a busy GPU takes at a share of its highest clock, W."""
    voltage = max(clock, _LEAST_VOLTAGE)
    return BUSY * device.power_w * (1 - _SWITCHING + _SWITCHING * clock * voltage**2)


def clock_at(device: Device, share: float) -> float:
    """Return the clock at which a busy GPU takes no more than so much of its limit; 1: the highest."""
    low, high = 0.05, 1.0
    if power_w(device, high) <= share * device.power_w:
        return 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if power_w(device, middle) <= share * device.power_w else (low, middle)
    return low
