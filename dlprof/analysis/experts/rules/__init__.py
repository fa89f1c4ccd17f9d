"""The rules of this subject, a file each."""
