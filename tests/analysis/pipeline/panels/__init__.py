"""Tests of dlprof/analysis/pipeline/panels."""
