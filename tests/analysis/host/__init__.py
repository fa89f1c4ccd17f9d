"""Tests of dlprof/analysis/host."""
