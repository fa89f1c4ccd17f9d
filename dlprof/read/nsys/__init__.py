"""Exports of NVIDIA Nsight Systems: SQLite files of any version."""
