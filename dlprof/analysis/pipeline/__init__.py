"""Pipelines: their stages, schedules and bubbles."""
