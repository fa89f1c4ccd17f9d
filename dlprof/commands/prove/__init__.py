"""The commands that prove something: they compare runs, try changes, predict, and fail a build."""
