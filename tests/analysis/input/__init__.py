"""Tests of dlprof/analysis/input."""
