"""Looks at jobs while they run, from outside: what each of their processes does, and why a job stands still."""
