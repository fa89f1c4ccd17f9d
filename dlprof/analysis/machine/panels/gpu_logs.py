"""What the GPU logs of other tools say of each GPU, as a table."""

from __future__ import annotations

from dlprof.analysis.engine import Frame, needs
from dlprof.analysis.machine.gpu_logs import gpu_uses
from dlprof.analysis.panel import Picture, table
from dlprof.result import Panel

MOST_GPUS = 64

_COLUMNS = {
    "source": "GPU",
    "readings": "readings",
    "busy_share": "some kernel ran_share",
    "idle_share": "readings when idle_share",
    "power_w": "power, W",
    "power_limit_w": "power limit, W",
    "sm_clock_mhz": "clock, MHz",
    "sm_clock_max_mhz": "clock at most, MHz",
    "temperature_c": "highest temperature, °C",
    "memory_used_bytes": "most memory in use_bytes",
    "memory_total_bytes": "memory_bytes",
}


def draw(gpu_uses: Frame = needs(gpu_uses)) -> list[Panel]:
    """List what each GPU did on the mean, and say which readings that is of and what the log lacks."""
    known = {name: title for name, title in _COLUMNS.items() if gpu_uses[name].notna().any()}
    whole = gpu_uses[gpu_uses["at"] == "log"]
    notes = ["Of the readings during the run." if whole.empty else "Of all readings, not of the run's alone."]
    notes += [f"{text[0].upper()}{text[1:]}." for text in dict.fromkeys(gpu_uses["why"]) if text]
    lacks = [text for text in dict.fromkeys(gpu_uses["lacks"]) if text]
    notes += [f"What it lacks comes with {lacks[0]}."] if lacks else []
    return [table("GPUs by their logs", gpu_uses, known, MOST_GPUS, note=" ".join(notes))]


PICTURE = Picture(draw)
