"""Tests of dlprof/report/compare."""
