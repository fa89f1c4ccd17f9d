"""Which ranks the others wait for, and why."""
