"""Tests of the panels of the user's lines."""
