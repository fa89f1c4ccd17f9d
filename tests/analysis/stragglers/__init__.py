"""Tests of dlprof/analysis/stragglers."""
