"""Tests of dlprof/analysis/precision/rules."""
