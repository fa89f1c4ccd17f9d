"""Tests of dlprof/read/nsys."""
