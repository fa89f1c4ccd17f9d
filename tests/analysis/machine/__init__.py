"""Tests of dlprof/analysis/machine."""
