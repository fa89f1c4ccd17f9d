"""What every measure of a device stands on: which step launched what, steps on the device's clock, its idle time."""
