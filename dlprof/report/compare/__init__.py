"""Several runs: a comparison of two, and what is said of more."""
