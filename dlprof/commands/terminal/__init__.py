"""What several commands show on a terminal."""
