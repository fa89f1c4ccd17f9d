"""Panels of the user's lines."""
