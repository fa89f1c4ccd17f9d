"""Tests of dlprof/analysis/step/rules."""
