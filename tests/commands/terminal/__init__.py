"""Tests of what several commands show on a terminal."""
