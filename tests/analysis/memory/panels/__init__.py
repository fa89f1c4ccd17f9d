"""Tests of dlprof/analysis/memory/panels."""
