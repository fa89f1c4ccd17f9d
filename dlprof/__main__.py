"""`python -m dlprof` is `dlprof`."""

from dlprof.cli import main

main()
