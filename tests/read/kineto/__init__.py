"""Tests of dlprof/read/kineto."""
