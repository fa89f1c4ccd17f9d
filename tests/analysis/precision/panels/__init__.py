"""Tests of dlprof/analysis/precision/panels."""
