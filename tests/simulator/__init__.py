"""Tests of the simulator alone, and of dlprof's reading of what it writes."""
