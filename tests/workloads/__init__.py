"""Tests of dlprof/workloads."""
