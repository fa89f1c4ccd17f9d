"""What was sampled next to the ranks: cores, clocks, power."""
