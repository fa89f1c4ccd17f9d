"""Tests of chains of operators."""
