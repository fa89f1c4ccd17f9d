"""Tests of dlprof.report.figures."""
