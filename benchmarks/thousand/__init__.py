"""Jobs of many ranks with planted faults: made from simulated ones, read by dlprof, and what that takes."""
