"""Copies, and what the device's memory holds."""
