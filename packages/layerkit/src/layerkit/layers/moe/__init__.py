"""Mixtures of experts: routing, capacity or none, balance, and the layer of it all."""
