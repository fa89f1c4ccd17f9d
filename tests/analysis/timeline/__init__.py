"""Tests of dlprof/analysis/timeline."""
