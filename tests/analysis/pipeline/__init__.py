"""Tests of dlprof/analysis/pipeline."""
