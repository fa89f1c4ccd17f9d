"""Tests of dlprof/analysis."""
