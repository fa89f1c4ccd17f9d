"""Starts the user's command, passes signals on, and ends as it ended."""
