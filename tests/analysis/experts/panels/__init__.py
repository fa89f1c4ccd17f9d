"""Tests of dlprof/analysis/experts/panels."""
