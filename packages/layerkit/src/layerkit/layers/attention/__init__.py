"""Attention layers: projections, position biases, caches, and the layers that combine them."""
