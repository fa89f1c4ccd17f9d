"""Tests of dlprof/analysis/chains."""
