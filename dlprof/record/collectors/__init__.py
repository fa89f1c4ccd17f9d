"""The sources of measurements inside a rank. Each starts once, gets every step that has ended, and stops once."""

from __future__ import annotations

from dlprof.record.collectors.compiled import Compiled
from dlprof.record.collectors.facts import Facts
from dlprof.record.collectors.flops import Flops
from dlprof.record.collectors.held import Held
from dlprof.record.collectors.lines import Lines
from dlprof.record.collectors.loader import Loader
from dlprof.record.collectors.losses import Losses, LossScale
from dlprof.record.collectors.memory import Memory
from dlprof.record.collectors.nsys import Capture, Nvtx
from dlprof.record.collectors.overrides import Overrides
from dlprof.record.collectors.pipeline import Pipeline
from dlprof.record.collectors.sources import Sources
from dlprof.record.collectors.stalls import Stalls
from dlprof.record.collectors.steps import Steps
from dlprof.record.collectors.trace import Routing, Trace

# Capture stands behind Nvtx, whose last range in the window has ended when that closes; Compiled behind Trace, whose
# window has ended then; Held behind Flops and Trace, whose un-timed steps it uses.
COLLECTORS = (
    Sources, Facts, Flops, Lines, Loader, Losses, LossScale, Memory, Nvtx, Capture, Overrides, Pipeline, Routing,
    Stalls, Steps, Trace, Compiled, Held,
)  # fmt: skip
