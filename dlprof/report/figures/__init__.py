"""Figures of the page: a way to draw for each shape of panel."""
