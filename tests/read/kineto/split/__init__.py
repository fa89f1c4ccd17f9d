"""Tests of dlprof/read/kineto/split."""
