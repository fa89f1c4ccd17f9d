"""How batches come to the training loop."""
