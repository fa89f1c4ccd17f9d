"""dlprof: where does the time of a training step go, and what would you gain by changing what?

`open(path)` gives a recorded run or a folder of traces; `step()` and `annotate(name)` let a script mark its own steps
and ranges, and cost next to nothing when nobody records.
"""

from __future__ import annotations

__version__ = "0.1.0"
