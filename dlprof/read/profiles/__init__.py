"""Stacks, call graphs and lines that other profilers write, into the tables "stacks", "functions" and "lines"."""
