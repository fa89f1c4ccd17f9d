"""Tests of dlprof/samplers."""
