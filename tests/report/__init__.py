"""Tests of dlprof/report."""
