"""One trace decoded by several processes."""
