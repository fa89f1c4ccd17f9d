"""Tests of the call sites that are recorded."""
