"""Tests of dlprof/read/profiles."""
