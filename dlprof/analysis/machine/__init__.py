"""What was sampled beside the ranks: cores, clocks, power."""
