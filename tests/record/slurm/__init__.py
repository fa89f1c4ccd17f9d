"""Tests of dlprof/record/slurm."""
