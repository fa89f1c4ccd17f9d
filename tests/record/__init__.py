"""Tests of dlprof/record."""
