"""Tests of dlprof/analysis/memory/rules."""
