"""Tests of results and how they are kept."""
