"""Tests of dlprof/commands/prove."""
