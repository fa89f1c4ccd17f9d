"""The panels of this subject, a file each."""
