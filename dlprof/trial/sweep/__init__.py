"""Runs of a job with each of several values of its settings: grids, measured in rounds, and kept as they come."""
