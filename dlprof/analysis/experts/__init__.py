"""Mixture of experts: which ranks get how many tokens, and what the others wait for."""
