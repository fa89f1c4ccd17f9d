"""Tests of dlprof/trial/sweep."""
