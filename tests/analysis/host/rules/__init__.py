"""Tests of dlprof/analysis/host/rules."""
