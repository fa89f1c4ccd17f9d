"""dlprof proved on a real GPU: every check of `make gpu`, each against an oracle that is not dlprof."""
