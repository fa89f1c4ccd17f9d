"""Tests of what the workloads share."""
