"""Tests of dlprof/analysis/step."""
