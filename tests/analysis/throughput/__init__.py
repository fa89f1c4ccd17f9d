"""Tests of dlprof/analysis/throughput."""
