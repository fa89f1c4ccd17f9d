"""From files to tables: a module for each raw format, and the run that they belong to."""
