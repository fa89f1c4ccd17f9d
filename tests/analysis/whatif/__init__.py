"""Tests of dlprof/analysis/whatif."""
