"""What the host does while its device waits, and where it waits for its device."""
