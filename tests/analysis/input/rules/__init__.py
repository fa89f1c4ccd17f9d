"""Tests of dlprof/analysis/input/rules."""
