"""What files of other tools say: profiles, and logs of GPUs."""

from __future__ import annotations

from typing import Literal

import msgspec


class Profile(msgspec.Struct, frozen=True):
    """What the profile of another tool shows on the whole, over the ranks that have it; and its hottest function.

    `unit`: of `total` (samples, ns, bytes). `share`: of the whole, in the function, and for the user's own also in what
    it calls of libraries. `own`: whether the function is the user's. `counted`: whether the tool counts calls, as
    cProfile and line_profiler do, and takes no samples.
    """

    name: str  # of the file
    tool: str
    unit: str
    total: float
    function: str = ""
    file: str = ""
    line: int = 0
    share: float = 0.0
    own: bool = False
    counted: bool = False


class GpuLog(msgspec.Struct, frozen=True):
    """What a log says of one GPU: means, the most of clock, memory and temperature; None: not logged.

    `at`: "run" where the readings are of the run's time, "log" where they are all that the log has. `held_by`: what
    holds its clock down (heat, power_brake, hardware, set, locked, limit), "": nothing, or not known.
    """

    gpu: str
    readings: int
    seconds: float
    at: Literal["run", "log"] = "log"
    busy_share: float | None = None
    idle_share: float | None = None  # of the readings
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    held_by: str = ""
    clock_lost: float = 0.0  # share of the clock
    lacks: str = ""  # options of the tool that would bring what it lacks
