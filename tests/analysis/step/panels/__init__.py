"""Tests of dlprof/analysis/step/panels."""
