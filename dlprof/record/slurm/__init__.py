"""Jobs for SLURM: the batch script of a recorded job, what puts its ranks into a container, and submitting it."""
