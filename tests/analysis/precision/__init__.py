"""Tests of dlprof/analysis/precision."""
