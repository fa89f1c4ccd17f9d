"""Tests of dlprof/analysis/compute."""
