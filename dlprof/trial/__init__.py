"""Tries what a report advises: runs the job again for some steps, with and without each change, and measures."""
