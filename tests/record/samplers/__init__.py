"""Tests of dlprof/record/samplers."""
