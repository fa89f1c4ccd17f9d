"""The mean steady step: its parts, what holds it up, and what it would be without something."""
