"""Chains of operators that one PyTorch operator could replace, found by their order, mostly without shapes."""
