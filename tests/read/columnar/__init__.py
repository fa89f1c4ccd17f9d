"""Tests of dlprof/read/columnar."""
