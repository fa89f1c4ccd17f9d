"""Dumps that PyTorch writes itself: snapshots of its allocator, and what its flight recorder saw of collectives."""
