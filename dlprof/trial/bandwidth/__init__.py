"""Measures how fast ranks exchange bytes: what `dlprof bandwidth` starts, or what takes part in a launcher's job."""
