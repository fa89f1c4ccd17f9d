"""What other tools read of a run is in their format, and holds what the run does."""
