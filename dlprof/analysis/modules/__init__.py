"""Which layer of the model the time is in: all work of the traced steps by the module that it is for."""
