"""Tests of dlprof/analysis/input/panels."""
