"""Logs of GPUs that other tools write, into the table "samples"."""
