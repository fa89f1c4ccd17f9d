"""Loops that other libraries drive: what the recorder marks in them. They skip where the library is not installed."""
