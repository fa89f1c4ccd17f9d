"""Tests of what the renderers make of a result."""
