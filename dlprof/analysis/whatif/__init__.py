"""What a run's step would be with something changed: by the replays that savings come from."""
