"""Tests of what every Python of a watched job runs as it starts."""
