"""Several runs: the comparison of two, and summaries of more."""
