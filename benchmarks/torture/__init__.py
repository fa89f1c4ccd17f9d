"""What is done to a recorded job to see whether it behaves as it would without dlprof."""
