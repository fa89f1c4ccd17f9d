"""Tests of the commands, one file each, as the package has them."""
