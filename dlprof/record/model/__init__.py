"""The script's own model: what its modules are called, when each runs, and what memory each holds; where
its tokens go; how its loss is scaled.
"""
