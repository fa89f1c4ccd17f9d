"""How numbers are rounded, and the scale that keeps small gradients from becoming 0."""
