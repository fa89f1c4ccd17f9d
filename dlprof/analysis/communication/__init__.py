"""What ranks exchange, and who waits in it."""
