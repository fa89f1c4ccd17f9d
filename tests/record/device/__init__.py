"""Tests of dlprof/record/device."""
