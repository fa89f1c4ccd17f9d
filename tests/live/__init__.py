"""Tests of what looks at running jobs."""
