"""Sources of measurements beside the ranks, each in a process of its own: GPU, host, stacks. None yet."""
