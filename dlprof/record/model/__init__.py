"""The script's model: names and forward passes of its modules, their memory, tokens of experts, loss scales."""
