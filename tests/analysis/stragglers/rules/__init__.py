"""Tests of dlprof/analysis/stragglers/rules."""
