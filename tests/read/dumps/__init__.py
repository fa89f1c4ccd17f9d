"""Tests of the readers of dumps."""
