"""Tests of dlprof/analysis/compare."""
