"""Reads traces by whole columns: from SQLite to rows, spans, and recurring steps."""
