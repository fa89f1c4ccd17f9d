"""What may befall a job that is recorded, done to real processes: it takes no harm, and what was recorded is there."""
