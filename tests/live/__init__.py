"""Tests of what looks at jobs while they run."""
