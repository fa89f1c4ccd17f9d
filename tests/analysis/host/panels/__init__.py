"""Tests of dlprof/analysis/host/panels."""
