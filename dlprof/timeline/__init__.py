"""What every measure of a device stands on: which step launched what, the steps on the device's clock, and its idle
time.
"""
