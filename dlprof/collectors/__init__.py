"""The sources of measurements inside a rank. Each starts once, hears of every step's end, and stops once."""

from __future__ import annotations

from dlprof.collectors.facts import Facts
from dlprof.collectors.flops import Flops
from dlprof.collectors.lines import Lines
from dlprof.collectors.loader import Loader
from dlprof.collectors.memory import Memory
from dlprof.collectors.nvtx import Nvtx
from dlprof.collectors.pipeline import Pipeline
from dlprof.collectors.stalls import Stalls
from dlprof.collectors.steps import Steps
from dlprof.collectors.trace import Trace

COLLECTORS = (
    Facts,
    Flops,
    Lines,
    Loader,
    Memory,
    Nvtx,
    Pipeline,
    Stalls,
    Steps,
    Trace,
)
