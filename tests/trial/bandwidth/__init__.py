"""Tests of dlprof/trial/bandwidth."""
