"""What is computed, in which operators and kernels, and how fast the device could do it."""
