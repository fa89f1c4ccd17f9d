"""Tests of what the benchmarks write."""
