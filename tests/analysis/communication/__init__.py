"""Tests of dlprof/analysis/communication."""
