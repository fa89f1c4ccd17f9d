"""Memory of devices and processes, and copies between host and device."""
