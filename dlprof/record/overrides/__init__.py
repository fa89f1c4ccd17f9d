"""The settings of `--set`, applied inside a rank.

Each `install…(asked, effects)` puts wrappers in place for the overrides of its kind that were asked for, and none for
others. A wrapper builds the script's object with the setting, notes it in the rank's Effects, and makes the script's
own call, unchanged, where that fails.
"""
