"""Tests of dlprof/analysis/experts/rules."""
