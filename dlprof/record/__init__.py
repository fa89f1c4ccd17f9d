"""What runs inside the ranks of a job, and beside them."""
