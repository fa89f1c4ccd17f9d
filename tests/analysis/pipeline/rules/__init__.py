"""Tests of dlprof/analysis/pipeline/rules."""
