"""Mixtures of experts: routing, capacity, load balancing and the layer that combines them."""
