"""The formats of other tools, one file each: how a file is recognised by its content, and how it becomes tables.

A new format is one file here (or in a folder of its own below `dlprof/read`), with a `FORMAT`, and one line in
`FORMATS` of dlprof/read/formats.py.
"""
