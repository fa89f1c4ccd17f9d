"""Tests of dlprof.analysis.modules."""
