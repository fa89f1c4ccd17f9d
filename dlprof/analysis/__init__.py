"""From tables to the result: measures of the ranks, and rules that estimate what each bottleneck costs."""
