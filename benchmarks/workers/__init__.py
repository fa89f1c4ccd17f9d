"""Predicted steps by number of loader workers, against measured ones: `python -m benchmarks.workers`."""
