"""Traces that are read by whole columns: from SQLite, to rows, to spans and the steps that recur in them."""
