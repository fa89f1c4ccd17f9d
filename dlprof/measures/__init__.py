"""Small frames derived from the tables of one rank, or from such frames of all ranks; each computed once a run."""
