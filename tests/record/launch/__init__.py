"""Tests of dlprof/record/launch."""
