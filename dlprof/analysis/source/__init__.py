"""The lines of the user's files: where a finding stands, and what its change looks like there."""
