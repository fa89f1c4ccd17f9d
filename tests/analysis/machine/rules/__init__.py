"""Tests of dlprof/analysis/machine/rules."""
