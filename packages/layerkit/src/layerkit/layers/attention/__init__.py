"""Attention: the layer, its projections, and the plain function at its core with its backends."""
