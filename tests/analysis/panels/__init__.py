"""Tests of dlprof.analysis.panels."""
