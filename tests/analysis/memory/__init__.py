"""Tests of dlprof/analysis/memory."""
