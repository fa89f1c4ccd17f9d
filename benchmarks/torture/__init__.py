"""Torture of dlprof: what is generated to break its promises, each with a seed."""
