"""Tests of the rules: each found, left alone, and abstaining."""
