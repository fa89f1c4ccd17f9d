"""How much a job trains on: samples and tokens of a step, of the whole job."""
