"""Tests of dlprof/analysis/experts."""
