"""What is measured and printed, never asserted: `make bench` runs all of it."""
