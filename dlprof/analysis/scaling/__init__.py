"""How a job scales with its ranks: what its runs on several numbers of ranks show, and what they say of more ranks."""
