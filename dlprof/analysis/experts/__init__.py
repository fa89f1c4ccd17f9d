"""Mixture of experts: how many tokens each rank receives, and how long the others wait."""
