"""Tests of dlprof/analysis/compute/panels."""
