"""Tests of dlprof/record/collectors."""
