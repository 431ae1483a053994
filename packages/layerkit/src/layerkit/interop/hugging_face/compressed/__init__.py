"""Weights in the formats of compression libraries, which are decoded while they are read."""
