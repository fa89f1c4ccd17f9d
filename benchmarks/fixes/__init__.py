"""What `dlprof fix` is worth, on scripts of the usual kinds."""
