"""Chains of operators that do what one operator of PyTorch's does: found by their order, mostly without shapes."""

from dlprof.analysis.compute.chains import growing, losses, norms, one_hot

__all__ = ["growing", "losses", "norms", "one_hot"]
