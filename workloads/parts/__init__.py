"""What several workloads share and none is about: the job around the training, data, models, optimizers."""
