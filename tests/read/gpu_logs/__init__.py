"""Tests of dlprof/read/gpu_logs."""
