"""The rank's GPU and its tracing libraries."""
