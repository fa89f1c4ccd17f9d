"""Tests of the formats of other tools."""
