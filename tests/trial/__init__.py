"""Tests of dlprof/trial."""
