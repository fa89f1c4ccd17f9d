"""Tests of the user's lines."""
