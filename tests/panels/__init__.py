"""Tests of the pictures of the report."""
