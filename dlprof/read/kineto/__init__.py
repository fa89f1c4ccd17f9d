"""Traces of PyTorch's profiler, from any version and machine."""
