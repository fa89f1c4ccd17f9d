"""The tests, laid out like dlprof itself."""
