"""Where in the model the time goes: all work of the traced steps by module."""
