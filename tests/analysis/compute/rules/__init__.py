"""Tests of dlprof/analysis/compute/rules."""
