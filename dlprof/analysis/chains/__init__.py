"""Chains of operators that do what one operator of PyTorch's does: found by their order, mostly without shapes."""
