"""Tests of dlprof/analysis/machine/panels."""
