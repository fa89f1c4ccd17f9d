"""Numeric precision: the loss scale that keeps small gradients from underflowing."""
