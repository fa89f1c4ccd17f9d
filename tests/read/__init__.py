"""Tests of dlprof/read."""
