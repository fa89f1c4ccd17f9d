"""Tests of folders of other tools' files."""
